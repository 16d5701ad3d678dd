"""One protocol, the same answers from a single rank, from threads, and from torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from acc_ops.comm import CommError, Meeting, SoloComm, ThreadComm, TorchComm
from acc_ops.testing import run_processes, run_threads
from acc_ops.world import current_world

EVERY_DTYPE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]


def values(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    count = max(1, torch.Size(shape).numel())
    numbers = torch.arange(count) + rank + 1
    made = (numbers % 2 == rank % 2) if dtype == torch.bool else numbers.to(torch.float32)
    return made.to(dtype)[: torch.Size(shape).numel()].reshape(shape)


def battery() -> list[Any]:
    """Every call for every dtype and awkward shape; what each rank must agree about is checked by the caller."""
    comm, rank, size = current_world().comm, current_world().rank, current_world().size
    out: list[Any] = []
    for dtype in EVERY_DTYPE:
        own = values(dtype, rank)
        everyone = comm.all_gather(own)
        assert everyone.dtype == dtype
        assert everyone.shape == (size, 2, 3)
        for other in range(size):
            assert (everyone[other] == values(dtype, other)).all()
        from_last = comm.broadcast(own.clone(), size - 1)
        assert (from_last == values(dtype, size - 1)).all()
        part = comm.scatter(
            [values(dtype, 10 + r) for r in range(size)] if rank == 0 else None, torch.empty_like(own)
        )
        assert (part == values(dtype, 10 + rank)).all()
        total = comm.all_reduce(own.clone())
        assert total.dtype == dtype
        out.append(total.to(torch.complex128 if dtype.is_complex else torch.float64).tolist())
    for op in ("sum", "max", "min", "product"):
        out.append(comm.all_reduce(torch.tensor([rank + 1, 5 - rank]), op).tolist())
        out.append(comm.all_reduce(torch.tensor([rank == 0, True, False]), op).tolist())
    out.append(comm.all_reduce(torch.tensor([1 + 1j * rank]), "product").tolist())
    transposed = torch.arange(6.0).reshape(2, 3).t()
    out.append(comm.all_reduce(transposed, "sum").tolist())
    out.append(comm.all_gather(torch.tensor(rank)).tolist())
    out.append(tuple(comm.all_gather(torch.empty(0, 3)).shape))
    weight = torch.ones(2, requires_grad=True)
    assert comm.broadcast(weight) is weight
    out.append(comm.all_gather_object({"rank": rank}))
    out.append(comm.broadcast_object(f"from {rank}", size - 1))
    out.append(comm.scatter_object([f"for {r}" for r in range(size)] if rank == 0 else None)[:4])
    comm.barrier()
    return out


def expected_sums(size: int) -> list[Any]:
    out = []
    for dtype in EVERY_DTYPE:
        parts = [values(dtype, r) for r in range(size)]
        if dtype == torch.bool:
            total = torch.stack(parts).any(0)
        else:
            total = torch.stack([p.to(torch.complex128) for p in parts]).sum(0)
            total = (total if dtype.is_complex else total.real).to(dtype)
        out.append(total.to(torch.complex128 if dtype.is_complex else torch.float64).tolist())
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads_exchange_every_dtype_exactly(size: int) -> None:
    first, *others = run_threads(size, battery)
    assert first[: len(EVERY_DTYPE)] == expected_sums(size)
    assert all(other == first for other in others)


def test_one_rank_alone_answers_like_a_world_of_one_thread(no_launcher: None) -> None:
    assert battery() == run_threads(1, battery)[0]


def test_a_process_group_of_one_answers_the_same(gloo_group: None) -> None:
    assert isinstance(current_world().comm, TorchComm)
    assert battery() == run_threads(1, battery)[0]


def in_a_process() -> tuple[list[Any], list[Any], tuple[Any, ...]]:
    world = current_world()
    return (
        battery(),
        sub_group(),
        (world.rank, world.size, world.local_rank, world.local_size, str(world.device)),
    )


def sub_group() -> list[Any]:
    pair = TorchComm(dist.new_group([1, 0]))
    outsider = dist.new_group([0])
    said = ""
    if dist.get_rank() == 1:
        with pytest.raises(CommError, match="not a member"):
            TorchComm(outsider)
        said = "refused"
    value = torch.tensor([float(dist.get_rank())])
    return [pair.rank, pair.size, pair.broadcast(value, 1).item(), said]


def test_real_processes_answer_like_threads_and_roots_are_ranks_of_their_group(no_launcher: None) -> None:
    (first, group_0, world_0), (second, group_1, world_1) = run_processes(2, in_a_process)
    assert [first, second] == run_threads(2, battery)
    assert [group_0, group_1] == [[0, 2, 1.0, ""], [1, 2, 1.0, "refused"]]
    # nobody launched them: they are taken for one machine
    assert [world_0[:4], world_1[:4]] == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_nothing_travels_after_the_call() -> None:
    def ranks() -> list[int]:
        comm = current_world().comm
        own = torch.tensor([comm.rank])
        everyone = comm.all_gather(own)
        own.fill_(9)  # what others received must not change with it
        comm.barrier()
        return everyone.flatten().tolist()

    assert run_threads(3, ranks) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda comm: comm.broadcast(torch.ones(1), 2), "root must be a rank from 0 to .*got 2"),
        (lambda comm: comm.broadcast(torch.ones(1), True), "got True"),
        (lambda comm: comm.all_reduce(torch.ones(1), "avg"), "op must be one of sum.*'avg'"),
        (lambda comm: comm.all_reduce(torch.ones(1, dtype=torch.complex64), "max"), "no order"),
        (lambda comm: comm.scatter([torch.ones(1)] * 5, torch.ones(1), comm.rank), "one part for each"),
        (lambda comm: comm.scatter_object(None, comm.rank), "one part for each of the .* ranks, got None"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments_are_named_before_anything_is_sent(
    call: Callable[[Any], Any], said: str, size: int
) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        run_threads(size, lambda: call(SoloComm() if size == 1 else current_world().comm))


def test_different_calls_raise_on_every_rank_and_the_ranks_can_go_on() -> None:
    def ranks() -> tuple[str, list[int]]:
        comm = current_world().comm
        with pytest.raises(CommError) as caught:
            comm.barrier() if comm.rank == 1 else comm.all_reduce(torch.ones(1))
        return str(caught.value), comm.all_gather(torch.tensor(comm.rank)).tolist()

    one, two = run_threads(2, ranks)
    assert one == two
    assert one == ("the ranks make different calls: rank 0 all_reduce('sum'), rank 1 barrier", [0, 1])


def test_a_rank_that_raised_ends_the_others_waiting() -> None:
    def ranks() -> None:
        if current_world().rank == 1:
            raise KeyError("lost")
        current_world().comm.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_threads(3, ranks)
    assert caught.value.__notes__ == ["on rank 1"]
    assert time.monotonic() - start < 5


def test_a_rank_that_ended_is_named_by_those_who_wait() -> None:
    def ranks() -> str:
        if current_world().rank == 1:
            return "done"
        with pytest.raises(CommError) as caught:
            current_world().comm.barrier()
        return str(caught.value)

    assert run_threads(2, ranks)[0] == "rank 0 waits in barrier for rank 1, which ended"


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    meeting = Meeting(2, timeout_s=0.05)
    with pytest.raises(CommError, match=r"barrier waited 0.05 s on rank 0; rank 1 did not make the call"):
        ThreadComm(meeting, 0).barrier()
    with pytest.raises(CommError, match="rank 1 did not make the call"):  # too late: rank 0 already gave up
        ThreadComm(meeting, 1).barrier()


def test_torch_distributed_must_be_initialised() -> None:
    with pytest.raises(CommError, match="join_world"):
        TorchComm()
