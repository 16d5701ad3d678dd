"""Properties of collectives over random nested data, with 1 to 5 ranks as threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_checks import (
    check_broadcast_then_gather,
    check_extremes,
    check_gather,
    check_pad,
    check_pad_gather_slice,
    check_reduce,
    check_refused_everywhere,
    check_scatter,
)
from ops_data import Leaf, Node, Spec
from ops_specs import NOT_PICKLABLE, STABLE, VIEWS, ranks, specs

from acc_ops.collectives import broadcast, copy_tensor_to_devices, gather, reduce, scatter
from acc_ops.testing import run_threads
from acc_ops.tree import flatten
from acc_ops.world import current_world

roots = st.integers(0, 4)


@given(specs("rows"), ranks)
@STABLE
def test_gather_is_the_concatenation_by_hand(spec: Spec, size: int) -> None:
    run_threads(size, lambda: check_gather(spec))


@given(specs(), ranks)
@STABLE
def test_gather_without_the_check_is_the_same_where_shapes_are_equal(spec: Spec, size: int) -> None:
    run_threads(size, lambda: check_gather(spec), verify=False)


@given(specs("sizes"), ranks, st.integers(-4, 3), st.booleans(), st.sampled_from([0, 1]), st.booleans())
@STABLE
def test_padding_fills_one_dimension_up_to_the_largest_size(
    spec: Spec, size: int, dim: int, pad_first: bool, pad_index: int, verify: bool
) -> None:
    run_threads(size, lambda: check_pad(spec, dim, pad_first, pad_index), verify=verify)


@given(specs("sizes"), ranks, st.booleans())
@STABLE
def test_padded_and_gathered_data_slices_back_to_what_each_rank_had(
    spec: Spec, size: int, pad_first: bool
) -> None:
    run_threads(size, lambda: check_pad_gather_slice(spec, pad_first))


@given(specs(views=VIEWS), ranks, roots, st.booleans())
@STABLE
def test_what_was_broadcast_is_the_same_on_every_rank(spec: Spec, size: int, root: int, verify: bool) -> None:
    run_threads(size, lambda: check_broadcast_then_gather(spec, root % size), verify=verify)


@given(specs(), ranks, st.sampled_from(["sum", "mean", "max", "min", "none"]), st.booleans())
@STABLE
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_reductions_are_exact_arithmetic_rounded_once(
    spec: Spec, size: int, reduction: str, verify: bool
) -> None:
    run_threads(size, lambda: check_reduce(spec, reduction), verify=verify)


@given(
    st.lists(specs("sizes", with_others=True, without=NOT_PICKLABLE), min_size=5, max_size=5),
    ranks,
    roots,
    st.booleans(),
)
@STABLE
def test_each_rank_gets_its_own_part_of_what_is_scattered(
    parts: list[Spec], size: int, root: int, verify: bool
) -> None:
    run_threads(size, lambda: check_scatter(parts, root % size), verify=verify)


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("count", [0, 9_000])  # inside the header, and apart
def test_nan_is_never_lost(reduction: str, count: int) -> None:
    for odd in range(3):
        run_threads(3, lambda odd=odd: check_extremes(reduction, count, odd))


@pytest.mark.parametrize("size", [1, 3])
def test_an_expanded_tensor_is_refused_by_broadcast_on_every_rank(size: int) -> None:
    spec = Node("dict", (Leaf("int16", ((2, 3),) * 5, "expanded"),), ("x",))
    run_threads(size, lambda: check_refused_everywhere("broadcast", spec, ValueError))
    whole = Leaf("int16", ((1, 3),) * 5, "expanded")  # has a stride of 0, but each element is one of its own
    run_threads(size, lambda: check_broadcast_then_gather(whole, 0))


UNCOPIED = [
    f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
]  # smaller than a byte, in one byte each
STORED_ONLY = [name for name in ("bits8", "bits16", "float4_e2m1fn_x2", *UNCOPIED) if hasattr(torch, name)]


@pytest.mark.parametrize("name", STORED_ONLY)
def test_dtypes_that_torch_can_only_store_travel_as_well(name: str) -> None:
    dtype = getattr(torch, name)

    def ones(*shape: int) -> torch.Tensor:
        whole = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), current_world().rank, dtype=torch.uint8)
        return whole.view(dtype)

    def call() -> list[int]:
        rank = current_world().rank
        own = [ones(rows) for rows in range(1, 7)]
        found = [
            gather(own),
            gather([ones(2, 3), ones(2, 3), ones(1)]),
            gather([ones(1 + rank, 2), ones(3)]),
            scatter([ones(1)] * 2 if rank == 1 else None, 1),
            copy_tensor_to_devices(ones(5) if rank == 1 else None),
            reduce(ones(2), "none"),
            broadcast(own, 1),
        ]
        leaves = [flatten(data)[0] for data in found]
        assert {tensor.dtype for tensors in leaves for tensor in tensors} == {dtype}
        return [sum(tensor.view(torch.uint8).sum().item() for tensor in tensors) for tensors in leaves]

    wanted = [[21, 13, 7, 1, 5, rank * 2, 21] for rank in range(2)]
    assert run_threads(2, call) == [[number * dtype.itemsize for number in row] for row in wanted]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", STORED_ONLY)
def test_dtypes_that_torch_can_only_store_are_not_reduced_on_any_number_of_ranks(
    name: str, size: int
) -> None:
    own = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))
    for reduction in ("sum", "max", "mean"):
        with pytest.raises(TypeError, match=f"tensors of torch.{name} are only stored and cannot be reduced"):
            run_threads(size, lambda reduction=reduction: reduce(own, reduction))
