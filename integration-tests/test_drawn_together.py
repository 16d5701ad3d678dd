"""What fails on one rank is drawn, made small and named on rank 0, and all ranks end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from drawn_together import check_on_every_rank
from hypothesis import strategies as st

from acc_ops.testing import RankFailed, run_processes, run_threads
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


def _failing_on(rank: int, error: BaseException) -> None:
    def check(plan: Plan) -> None:
        if current_world().rank == rank and plan.step > 1:
            raise error

    check_on_every_rank(check, PLANS, number=20)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_ends_all_ranks_and_is_shown(rank: int) -> None:
    with pytest.raises(RankFailed, match=rf"(?s)rank {rank} .*KeyError: 'no such file'.*with Plan\(step="):
        run_processes(2, _failing_on, rank, KeyError("no such file"), timeout_s=60)


@pytest.mark.parametrize(
    ("error", "shown"), [(KeyError("no file"), RuntimeError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_an_error_on_rank_0_is_met_once(error: BaseException, shown: type[BaseException]) -> None:
    runs = []

    def run() -> None:
        def check(plan: Plan) -> None:
            if current_world().rank == 0:
                runs.append(plan)
                raise error

        check_on_every_rank(check, PLANS, number=20)

    with pytest.raises(shown):
        run_threads(2, run, timeout_s=10)
    assert len(runs) == 1


def test_what_pytest_fails_on_rank_0_is_met_once_too() -> None:
    runs = []

    def run() -> None:
        def check(plan: Plan) -> None:
            if current_world().rank == 0:
                runs.append(plan)
                pytest.fail("not so")

        check_on_every_rank(check, PLANS, number=20)

    with pytest.raises(pytest.fail.Exception, match="not so"):
        run_threads(2, run, timeout_s=10)
    assert len(runs) == 1


def test_an_example_that_cannot_be_drawn_ends_all_ranks() -> None:
    def undrawable(step: int) -> Plan:
        raise LookupError(f"no plan of {step} steps")

    def run() -> None:
        check_on_every_rank(lambda plan: None, st.builds(undrawable, st.integers(1, 40)), number=5)

    with pytest.raises(LookupError, match="no plan of"):
        run_threads(2, run, timeout_s=10)


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
