"""A failure on one rank is a failure on all, and nobody hangs."""

from __future__ import annotations

import pytest

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.checkpoint.layout import CheckpointError
from acc_trainer.checkpoint.together import agree, together


def test_the_failing_rank_raises_its_own_error_and_the_others_name_it():
    def rank():
        world = current_world()
        try:
            with together(world, "writing"):
                if world.rank == 1:
                    raise OSError(28, "No space left on device")
        except (OSError, CheckpointError) as error:
            return type(error).__name__, str(error)
        return None

    first, second, third = run_threads(3, rank)
    assert second == ("OSError", "[Errno 28] No space left on device")
    assert (
        first
        == third
        == ("CheckpointError", "rank 1 failed while writing: OSError: [Errno 28] No space left on device")
    )


def test_nothing_is_raised_when_all_end_well():
    def rank():
        with together(current_world(), "writing"):
            return current_world().rank

    assert run_threads(2, rank) == [0, 1]


def test_ranks_that_disagree_all_hear_of_it():
    def rank():
        with pytest.raises(CheckpointError, match="disagree on the folder: rank 0 has a0, rank 1 has a1"):
            agree(current_world(), f"a{current_world().rank}", "the folder")
        return agree(current_world(), "same", "the folder")

    assert run_threads(2, rank) == ["same", "same"]
