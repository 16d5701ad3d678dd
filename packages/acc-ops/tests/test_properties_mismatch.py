"""Whatever one of 2 to 5 ranks does differently: every rank raises the same error, and the world works afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops_checks import CALLS, check_mismatch, check_refused_everywhere, check_unpicklable
from ops_data import Node, Other, Spec
from ops_specs import NOT_PICKLABLE, REDUCIBLE, SCALAR, STABLE, mutations, several_ranks, specs

from acc_ops.testing import run_threads

odd_ranks = st.integers(0, 4)
MAY_DIFFER = {"gather": "rows", "pad": "sizes", "broadcast": "nothing", "reduce max": "nothing"}
PLAIN = ("plain", "transposed", "strided")


@given(st.sampled_from(sorted(MAY_DIFFER)), several_ranks, odd_ranks, st.data())
@STABLE
def test_one_place_that_differs_is_the_same_error_on_every_rank(
    call: str, size: int, odd: int, data: st.DataObject
) -> None:
    spec = data.draw(specs(MAY_DIFFER[call], PLAIN, dtypes=REDUCIBLE))
    other = data.draw(st.sampled_from(mutations(spec, MAY_DIFFER[call])))
    run_threads(size, lambda: check_mismatch((call, spec, 0), (call, other, 0), odd % size))


@given(
    specs(views=PLAIN, without=NOT_PICKLABLE, dtypes=REDUCIBLE),
    several_ranks,
    odd_ranks,
    st.permutations(sorted(CALLS)),
)
@STABLE
def test_another_operation_or_reduction_is_the_same_error_on_every_rank(
    spec: Spec, size: int, odd: int, calls: list[str]
) -> None:
    run_threads(size, lambda: check_mismatch((calls[0], spec, 0), (calls[1], spec, 0), odd % size))


@given(
    specs(views=PLAIN, without=NOT_PICKLABLE),
    several_ranks,
    odd_ranks,
    st.sampled_from(["broadcast", "broadcast_object_list", "pad", "scatter"]),
    st.permutations([0, 1]),
)
@STABLE
def test_another_root_or_dimension_is_the_same_error_on_every_rank(
    spec: Spec, size: int, odd: int, call: str, roots: list[int]
) -> None:
    run_threads(size, lambda: check_mismatch((call, spec, roots[0]), (call, spec, roots[1]), odd % size))


@given(
    specs(views=PLAIN, without=NOT_PICKLABLE),
    several_ranks,
    odd_ranks,
    st.sampled_from(["gather_object", "broadcast_object_list", "scatter"]),
)
@STABLE
def test_an_object_that_cannot_travel_is_the_same_error_on_every_rank(
    spec: Spec, size: int, odd: int, call: str
) -> None:
    run_threads(size, lambda: check_unpicklable(call, spec, odd % size))


@given(st.sampled_from(sorted(MAY_DIFFER)), st.integers(1, 5), st.data())
@STABLE
def test_a_leaf_that_is_no_tensor_is_refused_on_any_number_of_ranks(
    call: str, size: int, data: st.DataObject
) -> None:
    spec: Any = data.draw(specs(MAY_DIFFER[call], PLAIN))
    changed = mutations(Node("list", (spec, SCALAR)), MAY_DIFFER[call])
    broken = data.draw(st.sampled_from([other for other in changed if _is_odd(other)]))
    run_threads(size, lambda: check_refused_everywhere(call, broken, TypeError))


def _is_odd(spec: Spec) -> bool:
    if isinstance(spec, Node):
        return any(_is_odd(child) for child in spec.children)
    return isinstance(spec, Other)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("call", ["broadcast", "broadcast_object_list", "scatter"])
def test_a_root_that_is_no_rank_is_refused_on_any_number_of_ranks(call: str, size: int) -> None:
    for root in (-1, size, True, 0.0, None):
        run_threads(size, lambda root=root: check_refused_everywhere(call, SCALAR, ValueError, root))
