"""Budgets: what is free, what is given, what balances."""

from __future__ import annotations

import types
from collections import Counter

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    budget,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
)
from acc_bigmodel.budget import check_present, device_key
from acc_ops.devices import memory_info
from acc_ops.fake_accelerator import fake_accelerator


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)


def blocks(count: int) -> tuple[nn.Module, int]:
    with init_empty_weights():
        model = nn.Sequential(*[Block() for _ in range(count)])
    return model, sum(p.numel() * 4 for p in model.parameters())


def test_what_is_free_without_an_argument() -> None:
    free = get_max_memory()
    assert free
    assert all(budget > 0 for budget in free.values())


def test_no_more_is_free_than_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory_info("cpu").free_bytes
    monkeypatch.setattr(budget, "present_kind", lambda: "cpu")
    monkeypatch.setattr(budget, "group_free_bytes", lambda: 5)
    assert get_max_memory() == {"cpu": 5}
    monkeypatch.setattr(budget, "group_free_bytes", lambda: 10 * free)
    assert get_max_memory()["cpu"] < 10 * free


def test_memory_that_accelerators_share_with_the_cpu_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "group_free_bytes", lambda: 1000)
    with fake_accelerator(count=2, total_bytes=3000) as fake:
        module = torch.get_device_module(fake.kind)
        assert get_max_memory() == {0: 3000, 1: 3000, "cpu": 1000}
        integrated = types.SimpleNamespace(is_integrated=1)
        monkeypatch.setattr(module, "get_device_properties", lambda _: integrated, raising=False)
        assert get_max_memory() == {0: 500, 1: 500}
        monkeypatch.setattr(
            module, "get_device_properties", lambda device: integrated if device.index else None
        )
        assert get_max_memory() == {0: 3000, 1: 1000}
    with fake_accelerator(count=1, total_bytes=3000, single=True, shares_host_memory=True) as fake:
        assert get_max_memory() == {fake.kind: 1000}


def test_what_is_used_on_a_device_is_not_free() -> None:
    with fake_accelerator(count=1, total_bytes=3000) as fake:
        held = torch.zeros(1000, dtype=torch.uint8).to(fake.device)
        assert get_max_memory()[0] == 2000
        del held
        assert get_max_memory()[0] == 3000


@pytest.mark.parametrize("size", ["lots", -1, float("nan"), True, None, "3 GX"])
def test_a_size_that_is_none_is_named_with_its_device(size: object) -> None:
    with pytest.raises(ValueError, match="max_memory gives 'cpu' the budget"):
        get_max_memory({"cpu": size})


def test_given_budgets_become_bytes_in_order_and_the_dict_is_left_alone() -> None:
    given = {"disk": "1GB", "cpu": "2KiB", torch.device("cuda", 3): 7, "cuda:0": "1KB", 1: 5}
    kept = dict(given)
    assert list(get_max_memory(given).items()) == [(0, 1000), (1, 5), (3, 7), ("cpu", 2048), ("disk", 10**9)]
    assert given == kept


@pytest.mark.parametrize("key", ["gpu 0", -1, True, None, 1.5])
def test_a_key_that_is_no_device_is_named(key: object) -> None:
    with pytest.raises(ValueError, match="is no device"):
        get_max_memory({key: 1})


def test_two_budgets_for_one_device_are_an_error() -> None:
    with pytest.raises(ValueError, match="two budgets"):
        get_max_memory({0: 1, "cuda:0": 2})


@pytest.mark.parametrize(("layers", "devices"), [(8, 4), (12, 4), (16, 8), (24, 8), (9, 4)])
def test_balanced_fills_every_device_alike(layers: int, devices: int) -> None:  # case big/67
    model, size = blocks(layers)
    budgets = get_balanced_memory(model, {**dict.fromkeys(range(devices), size), "cpu": size}, "Block")
    placed = Counter(infer_auto_device_map(model, budgets, "Block", clean_result=False).values())
    assert set(placed) == set(range(devices))
    assert max(placed.values()) == -(-layers // devices)
    assert max(placed.values()) - min(placed.values()) <= 1
    assert budgets[devices - 1] == size


def test_low_zero_goes_by_device_not_by_position() -> None:  # case big/01
    model, size = blocks(12)
    assert get_balanced_memory(model, {0: 2 * size, 3: 2 * size}, low_zero=True)[0] == 0
    budgets = get_balanced_memory(model, {0: 2 * size, 1: 0, 2: 2 * size}, low_zero=True)
    assert budgets[0] == 0
    assert set(infer_auto_device_map(model, budgets).values()) == {2}


def test_low_zero_keeps_on_device_0_what_the_others_cannot_hold() -> None:
    model, size = blocks(12)
    budgets = get_balanced_memory(model, {0: size, 1: size // 2, "cpu": size}, "Block", low_zero=True)
    assert size // 2 <= budgets[0] < size // 2 + size // 12
    assert "cpu" not in infer_auto_device_map(model, budgets, "Block").values()


def test_a_disk_budget_is_kept() -> None:  # case big/08
    budgets = get_balanced_memory(nn.Linear(4, 4), {0: 10_000, "cpu": 10_000, "disk": 10_000})
    assert budgets == {0: 10_000, "cpu": 10_000, "disk": 10_000}


def test_budgets_stay_when_the_model_does_not_fit_or_there_is_no_accelerator() -> None:
    model, size = blocks(4)
    assert get_balanced_memory(model, {0: size // 4, 1: size // 4, "cpu": size}) == {
        0: size // 4,
        1: size // 4,
        "cpu": size,
    }
    assert get_balanced_memory(model, {"cpu": size}) == {"cpu": size}


def test_balanced_is_never_above_what_was_given() -> None:
    model, size = blocks(8)
    given = {0: size // 2, 1: size // 8, 2: size}
    budgets = get_balanced_memory(model, given)
    assert all(budgets[device] <= given[device] for device in given)


def test_the_meta_device_has_no_budget() -> None:
    with pytest.raises(ValueError, match="max_memory gives 'meta' a budget"):
        get_max_memory({"meta": 10})


def test_a_device_that_is_not_there_is_named() -> None:
    check_present({"": "cpu", "layers": "disk", "head": "meta"})
    with pytest.raises(ValueError, match="'layers' to 'cuda:99', but this machine has"):
        check_present({"": "cpu", "layers": "cuda:99"})


def test_a_new_kind_of_single_device_needs_a_row_and_no_other_edit() -> None:
    with fake_accelerator(count=1, single=True, shares_host_memory=True) as fake:
        assert list(get_max_memory()) == [fake.kind]
        assert device_key(fake.device) == device_key(fake.kind) == fake.kind
        given = {"disk": 3, "cpu": 2, fake.kind: 1}
        assert list(get_max_memory(given)) == [fake.kind, "cpu", "disk"]
        check_present({"": fake.kind})
        with pytest.raises(ValueError, match="'head' to 0, but this machine has 0 numbered"):
            check_present({"head": 0})
    with fake_accelerator(count=2) as fake:
        assert list(get_max_memory()) == [0, 1, "cpu"]
        with pytest.raises(ValueError, match="'head' to 'mps', but this machine has 2 numbered"):
            check_present({"": 1, "head": "mps"})


def test_budgets_that_are_no_mapping_are_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match=r"max_memory is \[100\], but must map devices to sizes"):
        get_max_memory([100])
