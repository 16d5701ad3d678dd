"""What an empty context does with calls that it does not see, and with those that mix parameters with other tensors."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import deferred, init_empty_weights


def in_a_thread() -> torch.Tensor:
    given = torch.ones(3)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(given * 2))
    thread.start()
    thread.join()
    return found[0]


def exchanged() -> tuple[torch.Tensor, torch.Tensor]:
    one, two = torch.ones(3), torch.zeros(2)
    torch.utils.swap_tensors(one, two)
    return one, two


class Other(torch.Tensor):
    pass


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "unpickled": lambda: pickle.loads(pickle.dumps(torch.arange(3.0))),
    "pickled and back": lambda: pickle.loads(pickle.dumps(torch.ones(3))),
    "other memory": lambda: torch.ones(3).set_(torch.zeros(2)),
    "exchanged": exchanged,
    "in a thread": in_a_thread,
    "vmap": lambda: torch.vmap(lambda one: one * 2)(torch.ones(3)),
    "grad": lambda: torch.func.grad(lambda one: (one * one).sum())(torch.ones(3)),
    "another class": lambda: torch.ones(3).as_subclass(Other).as_subclass(torch.Tensor),
    "drawn in order": lambda: tuple(reversed((torch.randn(3), torch.randn(3)))),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_small_tensors_are_as_outside_where_no_function_mode_sees_them(kind: str) -> None:
    torch.manual_seed(3)
    expected = ELSEWHERE[kind]()
    torch.manual_seed(3)
    with init_empty_weights():
        found = ELSEWHERE[kind]()
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_file_of_weights_can_be_read_while_a_model_is_built(tmp_path: Path) -> None:
    torch.save({"table": torch.arange(4.0)}, tmp_path / "table.pt")
    with init_empty_weights():
        mapped = torch.load(tmp_path / "table.pt", mmap=True)
        module = nn.Module()
        module.register_buffer("table", torch.load(tmp_path / "table.pt")["table"])
    assert module.table.tolist() == mapped["table"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_large_tensors_with_weak_references_get_their_values() -> None:
    with init_empty_weights():
        large = torch.ones(2**19)
        known = weakref.ref(large)
    assert known() is large
    assert int(large.sum()) == 2**19


def test_what_cannot_get_values_is_an_error_and_never_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_SMALL_BYTES", 1)
    for kind in ("vmap", "grad"):
        with (
            pytest.raises(RuntimeError, match="make it before, or ask for its values first"),
            init_empty_weights(),
        ):
            ELSEWHERE[kind]()
    for kind in ("other memory", "exchanged"):
        with pytest.raises(RuntimeError, match=r"exchanged \(set_, swap_tensors\)"), init_empty_weights():
            kept = ELSEWHERE[kind]()
            nn.Module().register_buffer("kept", kept[0] if isinstance(kept, tuple) else kept)


def test_a_small_parameter_is_the_one_that_was_registered() -> None:
    module = nn.Module()
    with init_empty_weights():
        start = torch.ones(3)
        weight = nn.Parameter(start)
        module.weight = weight
        weight.mark = 1
    assert module.weight is weight
    assert weight.is_meta
    assert start.tolist() == [1.0] * 3


def test_parameters_compute_with_tensors_that_have_values() -> None:
    with init_empty_weights():
        linear, known = nn.Linear(4, 3), torch.tensor([1.0, 2, 3, 4])
        assert linear(torch.zeros(1, 4)).shape == (1, 3)
        assert nn.LSTM(4, 3)(torch.zeros(1, 2, 4))[0].shape == (1, 2, 3)
        assert nn.TransformerEncoderLayer(4, 2, 8)(torch.randn(1, 2, 4)).shape == (1, 2, 4)
        assert (linear.weight * known).is_meta
        assert torch.cat([linear.weight, torch.zeros(1, 4)]).shape == (4, 4)
        linear.weight.data = torch.randn(3, 4) * 0.02
        nn.utils.vector_to_parameters(torch.zeros(15), linear.parameters())
        assert linear.weight[torch.tensor([True, False, True])].shape == (2, 4)
        copied = copy.deepcopy(nn.BatchNorm1d(3))
        with pytest.raises(RuntimeError, match="'add_' asks for the values of a parameter"):
            known.add_(linear.weight[0])
    assert linear.weight.is_meta
    assert (copied.weight.is_meta, copied.running_var.tolist()) == (True, [1.0] * 3)
    assert known.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_value_of_a_parameter_is_refused_with_a_remedy() -> None:
    with (
        init_empty_weights(),
        pytest.raises(RuntimeError, match=r"'__float__' asks for the values .*init_on_device"),
    ):
        float(nn.Linear(2, 2).weight.std())


@pytest.mark.parametrize("include_buffers", [False, True])
def test_lazy_modules_can_be_built(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        norm = nn.LazyBatchNorm1d()
    assert norm.has_uninitialized_params()
