"""Collectives of nested data answer like the plain computation by hand, on one rank and on several, and fail alike on all."""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    pad_across_processes,
    reduce,
    verify_operation,
)
from acc_ops.testing import run_processes, run_threads
from acc_ops.tree import flatten, leaves_with_paths
from acc_ops.world import World, current_world

Pair = namedtuple("Pair", "left right")
DTYPES = [
    torch.float32,
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.int16,
    torch.uint8,
    torch.float64,
    torch.complex64,
]


@dataclass
class Batch:
    ids: Any


def tensor_for(rank: int, dtype: torch.dtype, shape: tuple[int, ...], ragged: bool, view: str) -> Tensor:
    """This rank's tensor of a leaf: other values, and other sizes of dimension 0 if `ragged`, on each rank."""
    if shape and ragged:
        shape = (shape[0] + rank % 3, *shape[1:])
    numbers = (torch.arange(torch.Size(shape).numel()) * 7 + rank * 3) % 11
    tensor = (numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)).reshape(shape)
    if view == "strided" and tensor.ndim >= 2:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if view == "grad" and tensor.is_floating_point():
        tensor.requires_grad_()
    return tensor


leaf = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
    st.sampled_from(["plain", "strided", "grad"]),
)
nested = st.recursive(
    leaf.map(lambda spec: ("leaf", spec)),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: ("list", v))
        | st.lists(inner, max_size=3).map(lambda v: ("tuple", v))
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda v: ("dict", v))
        | st.dictionaries(st.integers(0, 2), inner, max_size=3).map(lambda v: ("ordered", v))
        | st.tuples(inner, inner).map(lambda v: ("pair", v))
        | inner.map(lambda v: ("batch", v))
    ),
    max_leaves=8,
)


def build(spec: Any, rank: int, ragged: bool = True) -> Any:
    kind, value = spec
    if kind == "leaf":
        dtype, shape, is_ragged, view = value
        return tensor_for(rank, dtype, shape, is_ragged and ragged, view)
    if kind in ("dict", "ordered"):
        made = {key: build(inner, rank, ragged) for key, inner in value.items()}
        return made if kind == "dict" else OrderedDict(made)
    if kind == "batch":
        return Batch(build(value, rank, ragged))
    values = [build(inner, rank, ragged) for inner in value]
    return Pair(*values) if kind == "pair" else values if kind == "list" else tuple(values)


def assert_leaves(data: Any, expected: list[Tensor], like: Any) -> None:
    assert [p for p, _ in leaves_with_paths(data)] == [p for p, _ in leaves_with_paths(like)]
    for leaf, want in zip(flatten(data)[0], expected, strict=True):
        assert leaf.dtype == want.dtype
        assert leaf.shape == want.shape
        assert torch.equal(leaf, want)


def one_dim(leaf: Tensor) -> Tensor:
    return leaf.detach() if leaf.ndim else leaf.detach().unsqueeze(0)


ranks = st.integers(2, 4)
FEW = settings(max_examples=40, deadline=None)


@given(nested, ranks)
@FEW
def test_gather_is_the_concatenation_by_hand(spec: Any, size: int) -> None:
    data = [build(spec, r) for r in range(size)]
    expected = [
        torch.cat([one_dim(leaf) for leaf in leaves])
        for leaves in zip(*[flatten(d)[0] for d in data], strict=True)
    ]
    for result in run_threads(size, lambda: gather(data[current_world().rank])):
        assert_leaves(result, expected, data[0])
        assert type(result) is type(data[0])


@given(nested, ranks, st.sampled_from(["sum", "mean", "max", "min", "none"]))
@FEW
def test_reduce_is_the_reduction_by_hand(spec: Any, size: int, reduction: str) -> None:
    data = [build(spec, r, ragged=False) for r in range(size)]
    if reduction in ("max", "min") and any(leaf.is_complex() for leaf in flatten(data[0])[0]):
        with pytest.raises(ValueError, match="no order"):
            run_threads(size, lambda: reduce(data[current_world().rank], reduction))
        return
    results = run_threads(size, lambda: reduce(data[current_world().rank], reduction))
    for rank, result in enumerate(results):
        expected = []
        for leaves in zip(*[flatten(d)[0] for d in data], strict=True):
            stacked = torch.stack([leaf.detach() for leaf in leaves])
            is_int = not (stacked.is_floating_point() or stacked.is_complex())
            if reduction == "none":
                want = stacked[rank]
            elif reduction == "mean":
                want = stacked.to(torch.int64).sum(0) / size if is_int else wide_sum(stacked) / size
                want = want if is_int else want.to(stacked.dtype)
            elif stacked.dtype == torch.bool:
                want = stacked.all(0) if reduction == "min" else stacked.any(0)
            elif reduction == "sum":
                want = wide_sum(stacked).to(stacked.dtype)
            else:
                want = stacked.amax(0) if reduction == "max" else stacked.amin(0)
            expected.append(want)
        assert_leaves(result, expected, data[rank])


def wide_sum(stacked: Tensor) -> Tensor:
    if stacked.dtype == torch.bfloat16:
        return stacked.float().sum(0).to(torch.bfloat16)
    return stacked.sum(0)


@given(nested, ranks, st.integers(0, 3))
@FEW
def test_broadcast_overwrites_in_place_with_the_roots_values(spec: Any, size: int, root: int) -> None:
    root %= size
    data = [build(spec, r, ragged=False) for r in range(size)]
    expected = [leaf.detach().clone() for leaf in flatten(data[root])[0]]
    results = run_threads(size, lambda: broadcast(data[current_world().rank], root))
    for rank, result in enumerate(results):
        assert result is data[rank]
        assert_leaves(result, expected, data[root])


@given(nested, ranks, st.integers(-3, 3), st.booleans())
@FEW
def test_padded_data_has_the_largest_size_and_slices_back(
    spec: Any, size: int, dim: int, pad_first: bool
) -> None:
    data = [build(spec, r) for r in range(size)]
    results = run_threads(
        size, lambda: pad_across_processes(data[current_world().rank], dim, 1, pad_first=pad_first)
    )
    for rank, result in enumerate(results):
        for old, new, *everyone in zip(
            flatten(data[rank])[0], flatten(result)[0], *[flatten(d)[0] for d in data], strict=True
        ):
            if not -old.ndim <= dim < old.ndim:
                assert new is old
                continue
            target = max(leaf.shape[dim] for leaf in everyone)
            assert new.shape[dim] == target
            assert new.dtype == old.dtype
            added = target - old.shape[dim]
            assert torch.equal(new.narrow(dim, added if pad_first else 0, old.shape[dim]), old)
            assert (new.narrow(dim, 0 if pad_first else old.shape[dim], added) == 1).all()


@given(nested, ranks, st.data())
@FEW
def test_a_difference_anywhere_is_the_same_error_everywhere_and_the_ranks_go_on(
    spec: Any, size: int, draw: st.DataObject
) -> None:
    data = [{"spec": build(spec, r), "last": torch.ones(2, 3)} for r in range(size)]
    odd = draw.draw(st.integers(0, size - 1))
    change = draw.draw(st.sampled_from(["dtype", "shape", "dims", "key", "type", "leaf"]))
    changed = {
        "dtype": {"last": torch.ones(2, 3, dtype=torch.float64)},
        "shape": {"last": torch.ones(2, 4)},
        "dims": {"last": torch.ones(2)},
        "key": {"other": torch.ones(1)},
        "type": {"last": [torch.ones(2, 3)]},
        "leaf": {"last": "text"},
    }[change]
    data[odd] = {**data[odd], **changed}

    def call() -> tuple[str, int]:
        with pytest.raises(MismatchError) as caught:
            gather(data[current_world().rank])
        return str(caught.value), int(gather(torch.ones(1)).sum())

    results = run_threads(size, call)
    assert results == [results[0]] * size
    text, total = results[0]
    assert total == size
    assert "rank 0 " in text
    assert f"rank {odd or 1} " in text
    assert change in ("key", "leaf") or "batch['last']" in text


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
    (lambda: broadcast(torch.ones(1), 0), lambda: broadcast(torch.ones(1), 1), "root: rank 0 0, rank 1 1"),
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


def in_a_process() -> list[Any]:
    rank = current_world().rank
    spec = (
        "dict",
        {"a": ("leaf", (torch.bool, (3, 2), True, "strided")), "b": ("leaf", (torch.int16, (), False, ""))},
    )
    out: list[Any] = [
        {k: v.tolist() for k, v in gather(build(spec, rank)).items()},
        {k: v.tolist() for k, v in reduce(build(spec, rank, ragged=False)).items()},
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
