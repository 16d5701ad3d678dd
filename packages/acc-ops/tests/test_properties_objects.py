"""Any picklable objects reach every rank as they were."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ops_checks import check_objects
from ops_data import Color
from ops_specs import STABLE, others, ranks

from acc_ops.testing import run_threads

values = others | st.floats(allow_nan=False) | st.dates() | st.just(Color) | st.just(range(3))
objects = st.recursive(
    values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)
# One in a few is too long to travel inside a header.
any_objects = objects | st.text(min_size=1, max_size=3).map(lambda text: text * 20_000)


@given(st.lists(any_objects, min_size=5, max_size=5), ranks, st.integers(0, 4))
@STABLE
def test_objects_arrive_as_they_were_in_rank_order(objects: list[Any], size: int, root: int) -> None:
    run_threads(size, lambda: check_objects(objects, root % size))
