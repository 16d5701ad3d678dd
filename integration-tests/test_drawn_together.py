"""What fails on one rank is drawn, made small and named on rank 0, and all ranks end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from drawn_together import check_on_every_rank
from hypothesis import strategies as st

from acc_ops.testing import run_threads
from acc_ops.world import current_world


@dataclass(frozen=True)
class Plan:
    step: int
    blocking: bool


PLANS = st.builds(Plan, step=st.integers(1, 40), blocking=st.booleans())


def test_every_rank_runs_the_same_examples() -> None:
    def run() -> list[Plan]:
        seen: list[Plan] = []
        check_on_every_rank(seen.append, PLANS, number=8)
        return seen

    first, *others = run_threads(3, run)
    assert len(set(first)) >= 4
    assert others == [first, first]


def test_a_rank_that_fails_has_its_example_made_small_and_named() -> None:
    runs = []

    def run() -> None:
        def check(plan: Plan) -> None:
            rank = current_world().rank
            runs.append(rank)
            assert rank != 1 or plan.step < 7, "other weights"

        check_on_every_rank(check, PLANS, number=20, shrinking=30)

    with pytest.raises(
        AssertionError, match=r"with Plan\(step=7, blocking=False\), on rank 1: other weights"
    ):
        run_threads(2, run)
    assert runs.count(0) == runs.count(1)


def test_shrinking_ends_after_a_number_of_runs() -> None:
    runs = []

    def run() -> None:
        def check(plan: Plan) -> None:
            runs.append(plan)
            assert plan.step < 7

        check_on_every_rank(check, PLANS, number=20, shrinking=2)

    with pytest.raises(AssertionError, match=r"with Plan\(step="):
        run_threads(1, run)
    assert len(runs) < 20 + 3
