"""The whole package on a device that is not the CPU: a row of the table is all it needs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_ops import (
    broadcast,
    capture_rng,
    clear_device_cache,
    concatenate,
    convert_to_fp32,
    current_world,
    device_checks,
    devices,
    find_device,
    find_executable_batch_size,
    gather,
    gather_object,
    is_torch_xpu_tensor,
    join_world,
    leave_world,
    listify,
    pad_across_processes,
    pad_input_tensors,
    recursively_apply,
    reduce,
    restore_rng,
    scatter,
    send_to_device,
    set_seed,
    slice_tensors,
)
from acc_ops.fake_accelerator import FakeAccelerator, fake_accelerator
from acc_ops.testing import run_threads


@pytest.fixture
def fake(needs_fake_accelerator: None) -> Iterator[FakeAccelerator]:
    with fake_accelerator() as accelerator:
        yield accelerator


@dataclasses.dataclass
class Batch:
    ids: Tensor
    mask: Tensor


class Moving:
    """An object with a `.to` of its own, which knows no `non_blocking`."""

    def __init__(self) -> None:
        self.moves: list[torch.device] = []

    def to(self, device: torch.device) -> Moving:
        self.moves.append(device)
        return self


@pytest.mark.parametrize("size", [1, 2])
def test_scattered_tensors_arrive_where_the_roots_were(fake: FakeAccelerator, size: int) -> None:
    def call() -> list[str]:
        part = [torch.ones(1, device=fake.device), torch.ones(1)]
        return [leaf.device.type for leaf in scatter([part] * size if current_world().is_main else None)]

    assert run_threads(size, call, device=torch.device(fake.device)) == [[fake.kind, "cpu"]] * size


def test_every_question_is_answered_from_the_row(fake: FakeAccelerator) -> None:
    assert devices.present_kind() == fake.kind
    assert devices.device_count(fake.kind) == 2
    assert [devices.default_device(rank) for rank in range(2)] == fake.devices
    assert devices.canonical_device(1) == fake.devices[1]
    devices.set_device(fake.devices[1])
    assert devices.canonical_device(fake.kind) == fake.devices[1]
    assert torch.zeros(1, device=fake.kind).device == fake.devices[1]
    assert device_checks.get_current_device_type() == (
        fake.kind,
        devices.device_row(fake.kind).distributed_type,
    )
    assert device_checks.is_bf16_available()
    assert not device_checks.is_cuda_available()
    calls = torch.get_device_module(fake.kind).calls
    devices.synchronize()
    devices.synchronize(fake.device)
    devices.empty_cache()
    clear_device_cache(garbage_collection=True)
    assert calls == {"synchronize": 2, "empty_cache": 2}
    held = torch.zeros(1000, device=fake.device)
    assert (
        devices.memory_info(fake.device).free_bytes
        == devices.memory_info(fake.device).total_bytes - held.nbytes
    )


@pytest.mark.usefixtures("needs_fake_accelerator")
def test_the_row_says_what_autocast_can() -> None:
    with fake_accelerator(autocast_bf16=False):
        assert not device_checks.is_bf16_available()


def test_a_batch_moves_once_and_keeps_its_containers(fake: FakeAccelerator) -> None:
    shared = torch.arange(4.0)
    own = Moving()
    batch = OrderedDict(
        batch=Batch(shared, torch.ones(2)),
        again=[shared, (shared, "text", 3)],
        keep={"raw": torch.ones(1), "deep": [{"raw": torch.ones(1)}]},
        own=own,
        parameter=nn.Parameter(torch.ones(1)),
    )
    there = send_to_device(batch, fake.device, non_blocking=True, skip_keys="raw")
    assert type(there) is OrderedDict
    assert list(there) == list(batch)
    assert isinstance(there["batch"], Batch)
    assert there["again"][0] is there["batch"].ids is there["again"][1][0]
    assert there["again"][1][1:] == ("text", 3)
    assert there["keep"] is batch["keep"]
    assert own.moves == [fake.device]
    assert there["parameter"].device == fake.device
    assert batch["batch"].ids is shared
    assert shared.is_cpu
    assert fake.copies_to_device == 3
    assert fake.bytes_to_device == 16 + 8 + 4
    assert all(copy.non_blocking for copy in fake.log)
    fake.reset()
    assert send_to_device(there, fake.device, skip_keys=["raw"]) is there
    assert fake.log == []


def test_what_is_there_but_for_one_tensor_moves_that_one(fake: FakeAccelerator) -> None:
    here, there = torch.ones(2), torch.ones(3, device=fake.device)
    fake.reset()
    moved = send_to_device({"a": there, "b": [there, here], "c": (there,)}, fake.kind)
    assert moved["a"] is moved["b"][0] is moved["c"][0] is there
    assert moved["b"][1].device == fake.device
    assert fake.copies_to_device == 1
    back = send_to_device(moved, "cpu", non_blocking=True)
    assert find_device(back) == torch.device("cpu")
    assert [copy.non_blocking for copy in fake.log if copy.target.type == "cpu"] == [
        False,
        False,
    ]  # two tensors
    other = send_to_device(there, fake.devices[1])
    assert other.device == fake.devices[1]


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_however_the_device_is_named_nothing_moves_that_is_there(fake: FakeAccelerator, name: Any) -> None:
    for place, names in (
        ("cpu", [name]),
        (fake.device, [fake.device, fake.kind, torch.device(fake.kind), 0]),
    ):
        batch = {"x": torch.ones(1, device=place), "y": [nn.Parameter(torch.ones(1, device=place))]}
        assert all(send_to_device(batch, there) is batch for there in names)


def test_nested_data_stays_on_its_device(fake: FakeAccelerator) -> None:
    data = {"x": torch.arange(6.0, device=fake.device).reshape(3, 2).half(), "n": "text"}
    assert find_device(data) == fake.device
    results: list[Any] = [
        convert_to_fp32(data),
        slice_tensors(data, slice(0, 2)),
        concatenate([data, data]),
        pad_input_tensors(data["x"], 3, 2),
        recursively_apply(lambda tensor: tensor + 1, data),
    ]
    assert [find_device(result) for result in results] == [fake.device] * len(results)
    assert fake.log == []  # nothing travelled
    assert listify(data) == {"x": [[0, 1], [2, 3], [4, 5]], "n": "text"}
    assert not is_torch_xpu_tensor(data["x"])


def _speak(fake: FakeAccelerator) -> dict[str, Any]:
    rank = current_world().rank
    device = fake.devices[rank]
    batch = {
        "loss": torch.tensor(float(rank), device=device),
        "ids": torch.full((rank + 1, 2), rank, device=device),
        "half": torch.ones(2, device=device, dtype=torch.bfloat16),
        "cpu": torch.tensor([rank]),
    }
    results = {
        "gather": gather(batch),
        "sum": reduce({k: batch[k] for k in ("loss", "half", "cpu")}, "sum"),
        "mean": reduce(batch["loss"], "mean"),
        "pad": pad_across_processes(batch["ids"], pad_index=9),
        "broadcast": broadcast({"loss": batch["loss"].clone(), "cpu": batch["cpu"].clone()}, 1),
    }
    where = {
        name: [str(leaf.device) for leaf in torch.utils._pytree.tree_leaves(found)]
        for name, found in results.items()
    }
    objects = gather_object([("rank", rank)])
    return {
        "values": {name: listify(found) for name, found in results.items()},
        "where": where,
        "objects": objects,
    }


def test_ranks_speak_with_tensors_on_their_own_devices(fake: FakeAccelerator) -> None:
    first, second = run_threads(2, lambda: _speak(fake))
    assert (
        first["values"]["gather"]
        == second["values"]["gather"]
        == {
            "loss": [0, 1],
            "ids": [[0, 0], [1, 1], [1, 1]],
            "half": [1, 1, 1, 1],
            "cpu": [0, 1],
        }
    )
    assert first["values"]["sum"] == second["values"]["sum"] == {"loss": 1, "half": [2, 2], "cpu": [1]}
    assert first["values"]["mean"] == second["values"]["mean"] == 0.5
    assert first["values"]["pad"] == [[0, 0], [9, 9]]
    assert first["values"]["broadcast"] == {"loss": 1, "cpu": [1]}
    assert first["objects"] == [("rank", 0), ("rank", 1)]
    for rank, found in enumerate((first, second)):
        here = str(fake.devices[rank])
        assert found["where"] == {
            "gather": [here, here, here, "cpu"],
            "sum": [here, here, "cpu"],
            "mean": [here],
            "pad": [here],
            "broadcast": [here, "cpu"],
        }


def test_seeds_reach_the_device_and_its_state_is_kept(fake: FakeAccelerator) -> None:
    set_seed(5)
    first = [torch.rand(2, device=device).tolist() for device in fake.devices]
    set_seed(5)
    state = capture_rng()
    assert len(state[fake.kind]) == 2
    assert [torch.rand(2, device=device).tolist() for device in fake.devices] == first
    assert restore_rng(state) == []
    assert [torch.rand(2, device=device).tolist() for device in fake.devices] == first


def test_a_batch_size_that_fits_the_device_is_found_and_failed_attempts_are_freed(
    fake: FakeAccelerator,
) -> None:
    fake.set_total_bytes(5000)
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append((batch_size, fake.allocated_bytes()))
        kept = [torch.zeros(100, device=fake.device) for _ in range(batch_size)]
        return len(kept)

    assert train() == 12
    assert tried == [(16, 0), (14, 0), (12, 0)]
    assert fake.allocated_bytes() == 0


def test_a_world_without_a_launcher_is_on_the_device(fake: FakeAccelerator) -> None:
    assert current_world().device == fake.device
    try:
        assert join_world().device == fake.device
        assert current_world().device == fake.device
    finally:
        leave_world()
    try:
        assert join_world(cpu=True).device == torch.device("cpu")
    finally:
        leave_world()
