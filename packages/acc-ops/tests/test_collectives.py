"""What collectives say and send, on one rank and on several; what they compute is in test_properties_collectives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acc_ops.collectives import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    MismatchError,
    barrier,
    broadcast,
    chained_operation,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
    verify_operation,
)
from acc_ops.testing import run_processes, run_threads
from acc_ops.world import World, current_world


def test_the_error_names_the_path_and_both_sides() -> None:
    def call() -> str:
        width = 7 if current_world().rank == 1 else 8
        with pytest.raises(MismatchError) as caught:
            gather({"labels": [torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(4, width)]})
        return str(caught.value)

    assert run_threads(3, call) == ["batch['labels'][3]: rank 0 float32 (4, 8), rank 1 float32 (4, 7)"] * 3


ODD_CALLS: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (
        lambda: gather(torch.ones(1)),
        lambda: reduce(torch.ones(1)),
        "operation: rank 0 gather, rank 1 reduce('mean')",
    ),
    (
        lambda: reduce(torch.ones(1), "sum"),
        lambda: reduce(torch.ones(1), "max"),
        "operation: rank 0 reduce('sum'), rank 1 reduce('max')",
    ),
    (
        lambda: reduce(torch.ones(1), "none"),
        lambda: reduce(torch.ones(1), "sum"),
        "operation: rank 0 reduce('none'), rank 1 reduce('sum')",
    ),
    (
        lambda: reduce(torch.ones(1)),
        lambda: reduce(torch.ones(1), scale=2),
        "scale: rank 0 has 1.0, rank 1 has 2.0",
    ),
    (
        lambda: gather_tensor_shape(torch.ones(1)),
        lambda: copy_tensor_to_devices(torch.ones(1)),
        "operation: rank 0 gather_tensor_shape, rank 1 copy_tensor_to_devices",
    ),
    (
        lambda: broadcast(torch.ones(1), 0),
        lambda: broadcast(torch.ones(1), 1),
        "root: rank 0 has 0, rank 1 has 1",
    ),
    (lambda: barrier(), lambda: gather_object([1]), "operation: rank 0 barrier, rank 1 gather_object"),
    (
        lambda: broadcast({"x": torch.ones(2)}),
        lambda: broadcast({"x": torch.ones(3)}),
        "batch['x']: rank 0 float32 (2,), rank 1 float32 (3,)",
    ),
    (
        lambda: gather([torch.ones(1)]),
        lambda: gather([torch.ones(1), torch.ones(1)]),
        "batch: rank 0 list of 1, rank 1 list of 2",
    ),
    (
        lambda: gather({"a": torch.ones(1)}),
        lambda: gather({"b": torch.ones(1)}),
        "batch: rank 0 dict with 'a', rank 1 dict with 'b'",
    ),
    (
        lambda: gather(torch.ones(1)),
        lambda: gather([torch.ones(1)]),
        "tensor and batch: rank 0 float32 (1,), rank 1 list of 1",
    ),
]


@pytest.mark.parametrize(("one", "other", "said"), ODD_CALLS)
def test_ranks_that_do_different_things_are_told_so(
    one: Callable[[], Any], other: Callable[[], Any], said: str
) -> None:
    def call() -> str:
        with pytest.raises(MismatchError) as caught:
            one() if current_world().rank == 0 else other()
        return str(caught.value)

    assert run_threads(2, call) == [said, said]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("call", [gather, reduce, broadcast, pad_across_processes])
def test_leaves_that_are_no_tensors_are_refused_on_any_number_of_ranks(
    size: int, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=r"batch\['n'\] is a str: 'three'"):
        run_threads(size, lambda: call({"x": torch.ones(1), "n": "three"}))
    with pytest.raises(TypeError, match="meta device"):
        run_threads(size, lambda: call([torch.ones(1, device="meta")]))


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments_are_named(size: int) -> None:
    for call, said in [
        (lambda: reduce(torch.ones(1), "average"), "reduction must be one of mean.*'average'"),
        (lambda: broadcast(torch.ones(1), size), f"from_process must be a rank.*got {size}"),
        (lambda: pad_across_processes(torch.ones(1, dtype=torch.uint8), pad_index=-1), "pad_index=-1.*uint8"),
    ]:
        with pytest.raises(ValueError, match=said):
            run_threads(size, call)
    wrong: Any = "2"
    for call, said in [
        (lambda: reduce(torch.ones(1), "sum", wrong), "scale must be a number, got '2'"),
        (lambda: reduce(torch.ones(1), "sum", None), "scale must be a number, got None"),
        (lambda: pad_across_processes(torch.ones(1), dim=None), "dim must be a whole number, got None"),
        (lambda: pad_across_processes(torch.ones(1), dim=1.5), "dim must be a whole number, got 1.5"),
    ]:
        with pytest.raises(TypeError, match=said):
            run_threads(size, call)


def test_on_one_rank_the_same_object_comes_back_and_means_are_floats() -> None:
    data = {"x": torch.ones(2), "y": [torch.tensor(1)]}
    assert gather(data) is data
    assert pad_across_processes(data) is data
    assert broadcast(data) is data
    mean = reduce(torch.tensor([1, 2]))
    assert mean.tolist() == [1.0, 2.0]
    assert mean.dtype == run_threads(2, lambda: reduce(torch.tensor([1, 2])))[0].dtype == torch.float32
    copied = reduce(data, "sum")
    assert copied["x"] is not data["x"]
    assert torch.equal(copied["x"], data["x"])


def test_small_integers_do_not_wrap_around_in_a_mean() -> None:
    assert run_threads(4, lambda: reduce(torch.tensor([200], dtype=torch.uint8)).item()) == [200.0] * 4


def test_scale_says_that_it_does_nothing_here() -> None:
    with pytest.warns(UserWarning, match="scale=0.5.*XLA") as caught:
        assert reduce(torch.ones(1), "sum", scale=0.5).item() == 1.0
    assert caught[0].filename == __file__


def test_results_share_no_memory_with_each_other_or_the_input() -> None:
    def call() -> set[int]:
        own = [torch.ones(3), torch.ones(3), torch.ones(2)]
        made = [*gather(own), *reduce(own, "sum")]
        storages = {t.untyped_storage().data_ptr() for t in [*own, *made]}
        assert all(t.untyped_storage().nbytes() == t.numel() * 4 for t in made)
        return storages

    assert len(run_threads(2, call)[0]) == 9


def overwritten() -> list[Any]:
    """What a large broadcast leaves of tensors that are part of larger ones, and whether autograd noticed it."""
    rank = current_world().rank
    whole = torch.full((3, 20_000), float(rank))
    middle = whole[1].requires_grad_()
    product = torch.ones(20_000, requires_grad=True) * middle
    broadcast(middle, 0)
    columns = torch.full((20_000, 2), rank)
    broadcast(columns[:, 1], 0)
    noticed = False
    try:
        product.sum().backward()
    except RuntimeError as error:
        noticed = "modified by an inplace operation" in str(error)
    return [whole.sum(1).tolist(), columns.sum(0).tolist(), noticed]


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_large_broadcast_writes_into_the_tensor_itself_and_autograd_sees_it(
    run: Callable[..., list[Any]],
) -> None:
    root, other = run(2, overwritten)
    assert root == [[0.0] * 3, [0, 0], False]
    assert other == [[20_000.0, 0.0, 20_000.0], [20_000, 0], True]


@pytest.mark.parametrize("size", [1, 2])
def test_broadcast_refuses_tensors_in_which_several_elements_are_one(size: int) -> None:
    for make in (lambda: torch.zeros(6).unfold(0, 3, 1), lambda: torch.zeros(2, 1).expand(2, 3)):
        with pytest.raises(ValueError, match=r"several elements are one number.*pass a clone"):
            run_threads(size, lambda make=make: broadcast([make()]))


def test_one_rank_whose_elements_are_one_is_told_on_every_rank_before_anything_is_written() -> None:
    def call() -> tuple[str, float]:
        rank = current_world().rank
        own = torch.zeros(6).unfold(0, 3, 1) if rank == 1 else torch.ones(4, 3)
        with pytest.raises(MismatchError) as caught:
            broadcast(own)
        return str(caught.value), own.sum().item()

    (said, first), (also, second) = run_threads(2, call)
    assert said == also
    assert "rank 1 cannot take part: ValueError: broadcast writes into tensors, but in tensor several" in said
    assert (first, second) == (12.0, 0.0)


def test_a_large_broadcast_that_does_not_fit_writes_nothing() -> None:
    def call() -> float:
        own = torch.ones(20_000 + current_world().rank)
        with pytest.raises(MismatchError):
            broadcast(own, 0)
        return own.sum().item()

    assert run_threads(2, call) == [20_000.0, 20_001.0]


class CountingComm:
    """A comm that counts what goes through it."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.comm, name)
        if callable(value):
            self.calls.append(name)
        return value


def counted(call: Callable[[World], Any], verify: bool = True) -> list[str]:
    def rank() -> list[str]:
        world = current_world()
        comm = CountingComm(world.comm)
        call(
            World(
                rank=world.rank,
                size=world.size,
                local_rank=world.rank,
                local_size=world.size,
                device=world.device,
                comm=comm,
                verify=verify,
            )
        )
        return comm.calls

    return run_threads(2, rank)[0]


SMALL = [torch.ones(2), torch.ones(3, dtype=torch.int64)] * 100
LARGE = [torch.ones(40_000), torch.ones(3, dtype=torch.int64)]


def test_a_small_call_is_one_collective_whatever_the_structure() -> None:
    for call in (gather, reduce, broadcast, pad_across_processes):
        assert counted(lambda world, call=call: call(SMALL, world=world)) == ["all_gather"]
    assert counted(lambda world: gather_object([1], world)) == ["all_gather"]
    ragged = [torch.ones(2 + i % 3, 2) for i in range(20)]
    assert counted(lambda world: gather(ragged[world.rank :][:5], world)) == ["all_gather"]


def test_a_large_call_is_the_header_and_one_collective_per_dtype() -> None:
    assert counted(lambda world: gather(LARGE, world)) == ["all_gather", "all_gather"]
    assert counted(lambda world: broadcast(LARGE, 0, world)) == ["all_gather", "broadcast"]
    assert counted(lambda world: reduce(LARGE, "sum", 1.0, world)) == [
        "all_gather",
        "all_reduce",
        "all_reduce",
    ]
    assert counted(lambda world: gather_object(["x" * 100_000], world)) == ["all_gather", "all_gather"]


def test_without_the_check_there_is_no_header() -> None:
    assert counted(lambda world: gather(LARGE, world), verify=False) == ["all_gather"]
    assert counted(lambda world: broadcast(LARGE, 0, world), verify=False) == ["broadcast"]
    assert counted(lambda world: reduce(LARGE, "sum", 1.0, world), verify=False) == [
        "all_reduce",
        "all_reduce",
    ]


def test_large_and_ragged_data_answers_the_same_without_the_check() -> None:
    def call() -> list[Any]:
        rank = current_world().rank
        big = torch.full((20_000,), rank)
        return [
            gather([big, torch.tensor(rank)])[0].sum().item(),
            reduce(big, "max").sum().item(),
            broadcast(big, 1).sum().item(),
            pad_across_processes(torch.ones(rank + 1, 20_000)).shape,
        ]

    assert run_threads(2, call) == run_threads(2, call, verify=False)


def test_more_leaves_than_the_header_has_room_for_are_padded_and_joined() -> None:
    def call() -> tuple[int, int]:
        rank = current_world().rank
        many = [torch.full((1 + (i + rank) % 2,), i) for i in range(2_500)]
        return sum(t.numel() for t in gather(many)), sum(t.numel() for t in pad_across_processes(many))

    assert run_threads(2, call) == [(7_500, 5_000)] * 2


def test_nested_tensors_pass_through_padding_with_a_warning() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

    def call() -> tuple[bool, int]:
        out = pad_across_processes({"j": jagged, "x": torch.ones(current_world().rank + 1)})
        return out["j"] is jagged, len(out["x"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_threads(2, call) == [(True, 2)] * 2
    with pytest.warns(CannotPadNestedTensorWarning) as caught:
        pad_across_processes(jagged)
    assert [warning.filename for warning in caught if warning.category is CannotPadNestedTensorWarning] == [
        __file__
    ]


def test_a_collective_of_ones_own_is_verified_and_named() -> None:
    @verify_operation
    def exchange(tensor: Tensor) -> str:
        return "ran"

    @chained_operation
    def outer(tensor: Tensor) -> str:
        return exchange(tensor)

    assert run_threads(2, lambda: outer(torch.ones(2))) == ["ran", "ran"]
    assert run_threads(2, lambda: outer(torch.ones(current_world().rank)), verify=False) == ["ran", "ran"]
    with pytest.raises(
        DistributedOperationException, match=r"in outer: tensor: rank 0 float32 \(0,\), rank 1"
    ):
        run_threads(2, lambda: outer(torch.ones(current_world().rank)))
    assert outer(torch.ones(1)) == "ran"


def test_a_collective_of_ones_own_is_verified_in_the_world_it_is_given_however_that_is_passed() -> None:
    @verify_operation
    def exchange(tensor: Tensor, world: World | None = None) -> str:
        return "ran"

    def call() -> list[str]:
        data, unverified = (
            torch.ones(current_world().rank),
            dataclasses.replace(current_world(), verify=False),
        )
        with pytest.raises(MismatchError):
            exchange(data, current_world())
        return [
            exchange(data, unverified),
            exchange(data, world=unverified),
            exchange(world=unverified, tensor=data),
        ]

    assert run_threads(2, call) == [["ran"] * 3] * 2


def in_a_process() -> list[Any]:
    rank = current_world().rank
    mask = (torch.arange(2 * (3 + rank)).reshape(2, 3 + rank) % 3 == rank).t()
    number = torch.tensor(rank, dtype=torch.int16)
    out: list[Any] = [
        {k: v.tolist() for k, v in gather({"a": mask, "b": number}).items()},
        {k: v.tolist() for k, v in reduce({"a": mask[:3], "b": number}).items()},
        gather(torch.full((30_000,), rank)).sum().item(),
        broadcast(torch.full((30_000,), rank, dtype=torch.bfloat16), 1).sum().item(),
        gather_object({"rank": rank}),
        gather(torch.ones(2 - rank, 5)[:, -1]).shape,
        reduce(torch.full((9_000,), 60_000.0, dtype=torch.float16))[-1].item(),
    ]
    for one, other, _ in ODD_CALLS:
        with pytest.raises(MismatchError) as caught:
            one() if rank == 0 else other()
        out.append(str(caught.value))
    barrier()
    return out


def test_real_processes_answer_and_fail_like_threads() -> None:
    results = run_processes(2, in_a_process)
    assert results == run_threads(2, in_a_process)
    assert results[0] == results[1]
    assert results[0][7:] == [said for _, _, said in ODD_CALLS]


def test_a_column_of_one_row_travels_like_any_other() -> None:
    def call() -> list[Any]:
        rank = current_world().rank
        logits = torch.arange(10.0).reshape(2, 5)[: 1 if rank == 1 else 2]
        column = torch.full((1, 5), rank)[:, 2]
        return [
            gather(logits[:, -1]).tolist(),
            gather({"a": column, "b": [column]})["b"][0].tolist(),
            reduce(column, "sum").tolist(),
            copy_tensor_to_devices(logits[:, -1] if rank == 1 else None).tolist(),
            broadcast(column, 1).tolist(),
        ]

    assert run_threads(2, call) == [[[4.0, 9.0, 4.0], [0, 1], [1], [4.0], [1]]] * 2


@pytest.mark.parametrize("count", [1, 9_000])  # inside the header, and apart
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (60000.0, torch.float16),
        (1.5 * 2.0**127, torch.float32),
        (3.3e38, torch.bfloat16),
        (2**62 + 1, torch.int64),
        (2.0, torch.float8_e4m3fn),
        (1 + 2j, torch.complex32),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_mean_of_equal_numbers_is_that_number_on_any_number_of_ranks(
    count: int, value: Any, dtype: torch.dtype
) -> None:
    own = torch.tensor([value]).to(dtype).expand(count)
    alone, *together = [run_threads(size, lambda: reduce(own))[0] for size in (1, 2, 3)]
    wanted = own.to(torch.get_default_dtype()) if dtype == torch.int64 else own
    for mean in (alone, *together):
        assert mean.dtype == wanted.dtype
        assert mean.tolist() == wanted.tolist()
