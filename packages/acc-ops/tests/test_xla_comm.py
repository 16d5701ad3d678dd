"""Ranks of torch_xla speak through its collectives. What torch_xla does is told by a stand-in: no device was at hand."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_xla import FakeXla

from acc_ops import collectives, devices, world
from acc_ops.collectives import (
    MismatchError,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from acc_ops.comm import ThreadComm
from acc_ops.random import set_seed
from acc_ops.rng_sharing import synchronize_rng_state
from acc_ops.testing import run_threads
from acc_ops.world import World, current_world, join_world, leave_world, use_world
from acc_ops.xla_comm import XlaComm

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@contextlib.contextmanager
def xla_world(verify: bool = True) -> Iterator[World]:
    """This thread's rank as one of torch_xla's."""
    comm = XlaComm()
    made = World(
        rank=comm.rank,
        size=comm.size,
        device=torch.device("xla", 0),
        comm=comm,
        verify=verify,
        local_size=comm.size,
    )
    with use_world(made):
        yield made


def on_xla(num_ranks: int, call: Callable[[], Any], verify: bool = True) -> list[Any]:
    def work() -> Any:
        with xla_world(verify):
            return call()

    return run_threads(num_ranks, work, timeout_s=20)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """(2, 3), different on each rank."""
    return (torch.arange(6).view(2, 3) % 3 + current_world().rank % 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_answers_as_threads_do(fake_xla: FakeXla, dtype: torch.dtype) -> None:
    def call() -> list[torch.Tensor]:
        comm, own = current_world().comm, numbers(dtype)
        made = [comm.all_gather(own), comm.broadcast(own.clone(), 1)]
        made.append(comm.scatter([own, own, own] if comm.rank == 2 else None, own.clone(), 2))
        for op in ("sum", "max", "min", "product"):
            if not (dtype.is_complex and op in ("max", "min")):
                made.append(comm.all_reduce(own.clone(), op))
        return made

    expected, found = run_threads(3, call), on_xla(3, call)
    for of_threads, of_xla in zip(expected, found, strict=True):
        for one, other in zip(of_threads, of_xla, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))


def test_objects_travel_in_one_rendezvous_each(fake_xla: FakeXla) -> None:
    def call() -> list[Any]:
        comm = current_world().comm
        return [
            comm.all_gather_object({"rank": comm.rank, "text": "x" * comm.rank}),
            comm.broadcast_object(["of", comm.rank], 1),
            comm.scatter_object([(i, "part") for i in range(3)] if comm.rank == 0 else None),
        ]

    assert on_xla(3, call) == run_threads(3, call)
    assert fake_xla.calls == ["rendezvous"] * 3


def test_nothing_is_sent_for_empty_tensors(fake_xla: FakeXla) -> None:
    def call() -> list[tuple[int, ...]]:
        comm, empty = current_world().comm, torch.empty(0, 4)
        results = [comm.all_gather(empty), comm.all_reduce(empty), comm.broadcast(empty)]
        return [tuple(result.shape) for result in [*results, comm.scatter([empty, empty], empty)]]

    assert on_xla(2, call)[0] == [(2, 0, 4), (0, 4), (0, 4), (0, 4)]
    assert fake_xla.calls == []


def test_what_is_given_stays_as_it_is_on_the_root(fake_xla: FakeXla) -> None:
    def call() -> bool:
        comm = current_world().comm
        own = torch.arange(4.0)
        comm.broadcast(own, 0)
        parts = [torch.zeros(2), torch.ones(2)]
        comm.scatter(parts if comm.rank == 0 else None, torch.empty(2))
        return own.tolist() == [0, 1, 2, 3] and parts[0].tolist() == [0, 0]

    assert on_xla(2, call) == [True, True]


@pytest.mark.parametrize("verify", [True, False])
def test_collectives_of_nested_data_work_on_it(fake_xla: FakeXla, verify: bool) -> None:
    def call() -> Any:
        rank = current_world().rank
        data = {"a": torch.full((2,), rank), "b": [torch.tensor(rank * 1.5), torch.tensor([rank == 1])]}
        everyone = gather(data)
        mean = reduce(data["b"][0])
        first = broadcast(torch.tensor([rank, 7]), 1)
        padded = pad_across_processes(torch.ones(2 + rank), pad_index=-1)
        listed = broadcast_object_list(["x", rank], 1)
        return (
            everyone["a"].tolist(),
            everyone["b"][1].tolist(),
            mean.item(),
            first.tolist(),
            padded.tolist()[2:],
            listed,
            gather_object([rank]),
            scatter([torch.zeros(1), torch.ones(1)] if rank == 0 else None).tolist(),
        )

    expected = run_threads(2, call)
    assert on_xla(2, call, verify) == expected


def test_a_mismatch_is_the_same_error_on_every_rank(fake_xla: FakeXla) -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            gather({"x": torch.ones(2, 3 + current_world().rank)})
        assert gather(torch.ones(1)).tolist() == [1, 1]
        return str(caught.value)

    one, two = on_xla(2, call)
    assert one == two
    assert "rank 0 float32 (2, 3), rank 1 float32 (2, 4)" in one


def test_scale_multiplies_the_result_of_a_reduction(
    fake_xla: FakeXla, recwarn: pytest.WarningsRecorder
) -> None:
    def call() -> list[Any]:
        own = torch.tensor([1.0, 2.0]) + current_world().rank
        return [
            reduce(own, "sum", scale=0.5).tolist(),
            reduce(own, scale=4).tolist(),
            reduce(own.long(), "max", scale=2).tolist(),
            reduce(own.to(torch.float8_e5m2), "sum", scale=0.5).float().tolist(),
            reduce(own, "none", scale=0.5).tolist()[0] - current_world().rank,
        ]

    expected = [[1.5, 2.5], [6, 10], [4, 6], [1.5, 2.5], 1]
    assert on_xla(2, call) == [expected, expected]
    assert on_xla(2, call, verify=False) == [expected, expected]
    assert on_xla(1, call)[0][:2] == [[0.5, 1.0], [4, 8]]
    assert not [warning for warning in recwarn if "scale" in str(warning.message)]
    run_threads(1, lambda: reduce(torch.ones(1), "sum", scale=2))
    assert "only acts on XLA" in str(recwarn.pop(UserWarning).message)


def test_wrong_arguments_are_refused_before_anything_is_sent(fake_xla: FakeXla) -> None:
    def call() -> None:
        comm = current_world().comm
        for wrong in (
            lambda: comm.broadcast(torch.ones(1), 2),
            lambda: comm.all_reduce(torch.ones(1), "average"),
            lambda: comm.scatter([torch.ones(1)], torch.ones(1), root=comm.rank),
            lambda: comm.scatter_object(None, root=comm.rank),
        ):
            with pytest.raises(ValueError, match="got"):
                wrong()

    on_xla(2, call)
    assert fake_xla.calls == []


def test_joining_takes_ranks_and_device_from_torch_xla(fake_xla: FakeXla, no_launcher: None) -> None:
    joined = join_world()
    assert isinstance(joined.comm, XlaComm)
    assert (joined.rank, joined.size, joined.local_rank, joined.local_size) == (0, 1, 0, 1)
    assert joined is current_world() is join_world()
    leave_world()
    assert current_world() is not joined


def test_a_cpu_can_be_asked_for_beside_it(fake_xla: FakeXla, no_launcher: None) -> None:
    assert not isinstance(join_world(cpu=True).comm, XlaComm)


def test_options_without_effect_are_told(
    fake_xla: FakeXla, no_launcher: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        join_world(backend="gloo")
    assert "on XLA devices backend has no effect" in caplog.text


def test_threads_that_drive_a_device_each_join_for_themselves(
    fake_xla: FakeXla, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_xla.devices_of_process = 2

    def work() -> tuple[int, list[int]]:
        joined = join_world(device="xla:0")
        assert current_world() is joined
        assert isinstance(joined.comm, XlaComm)
        return joined.rank, gather(torch.tensor([joined.rank])).tolist()

    assert run_threads(2, work, timeout_s=20) == [(0, [0, 1]), (1, [0, 1])]
    assert world._joined is None


def test_generators_are_seeded_and_shared(fake_xla: FakeXla) -> None:
    def call() -> None:
        set_seed(5, device_specific=True)
        synchronize_rng_state("xla")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", lambda seed: None)  # ranks in threads share it
        on_xla(3, call)
    assert fake_xla.seeds == {0: 5, 1: 5, 2: 5}
    assert devices.present_kind() == "xla"


def test_it_answers_every_call_that_the_other_comms_answer() -> None:
    calls = [name for name in dir(ThreadComm) if not name.startswith("_")]
    assert [name for name in calls if not hasattr(XlaComm, name)] == []
    assert collectives.REDUCTIONS == ("mean", "sum", "max", "min", "none")
