"""The properties of acc-ops' collectives, which its own tests try on threads, on two real gloo processes."""

from __future__ import annotations

from typing import Any

import ops_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_specs import NOT_PICKLABLE, REDUCIBLE, SCALAR, STABLE, VIEWS, mutations, specs

from acc_ops.testing import run_processes

Example = tuple[str, tuple[Any, ...]]  # the name of a check, and what to check it with
PICKLABLE = specs("sizes", with_others=True, without=NOT_PICKLABLE)
MAY_DIFFER = {"gather": "rows", "pad": "sizes", "broadcast": "nothing", "reduce max": "nothing"}
UNPICKLABLE: list[Example] = [
    ("check_unpicklable", (name, SCALAR, odd))
    for name in ("gather_object", "broadcast_object_list", "scatter")
    for odd in (0, 1)
]
EXTREMES: list[Example] = [
    ("check_extremes", (reduction, count, odd))
    for reduction in ("max", "min")
    for count in (0, 9_000)
    for odd in (0, 1)
]
one_of_two = st.integers(0, 1)
reductions = st.sampled_from(["sum", "mean", "max", "min"])
mismatches = st.sampled_from(sorted(MAY_DIFFER)).flatmap(
    lambda call: specs(MAY_DIFFER[call], dtypes=REDUCIBLE, views=("plain", "strided")).flatmap(
        lambda spec: st.sampled_from(mutations(spec, MAY_DIFFER[call])).map(
            lambda other: ((call, spec, 0), (call, other, 0))
        )
    )
)
examples = st.one_of(
    st.tuples(st.just("check_gather"), st.tuples(specs("rows"))),
    st.tuples(st.just("check_pad"), st.tuples(specs("sizes"), st.integers(-4, 3), st.booleans())),
    st.tuples(st.just("check_pad_gather_slice"), st.tuples(specs("sizes"), st.booleans())),
    st.tuples(st.just("check_broadcast_then_gather"), st.tuples(specs(views=VIEWS), one_of_two)),
    st.tuples(st.just("check_reduce"), st.tuples(specs(), reductions)),
    st.tuples(st.just("check_scatter"), st.tuples(st.lists(PICKLABLE, min_size=2, max_size=2), one_of_two)),
    st.tuples(st.just("check_objects"), st.tuples(st.lists(st.text(), min_size=2, max_size=2), one_of_two)),
    st.tuples(
        st.just("check_mismatch"),
        st.tuples(mismatches, one_of_two).map(lambda drawn: (*drawn[0], drawn[1])),
    ),
)


def drawn(count: int) -> list[Example]:
    """The same `count` examples on every machine."""
    found: list[Example] = []

    @given(examples)
    @settings(STABLE, max_examples=count)
    def collect(example: Example) -> None:
        found.append(example)

    collect()
    return found


def run_checks(examples: list[Example]) -> int:
    """Runs in each process: what the threads of the package's own tests run."""
    for name, arguments in examples:
        getattr(ops_checks, name)(*arguments)
    return len(examples)


def test_two_real_processes_have_the_properties_that_threads_have() -> None:
    examples = [*drawn(200), *UNPICKLABLE, *EXTREMES]
    assert {name for name, _ in examples} >= {
        "check_gather",
        "check_reduce",
        "check_scatter",
        "check_mismatch",
    }
    assert run_processes(2, run_checks, examples, timeout_s=100) == [len(examples)] * 2
