"""Ranks that save or load at different steps, or with different options, hear of it together, before anything is touched."""

from __future__ import annotations

import pytest

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.checkpoint import CheckpointError, load_state, save_state


def refused(call, *args, **options):
    with pytest.raises(CheckpointError) as said:
        call(*args, **options)
    return str(said.value)


@pytest.mark.parametrize(
    "option",
    [
        {"checksums": (True, False)},
        {"strict": (True, False)},
        {"map_location": ("cpu", None)},
        {"load_kwargs": ({"weights_only": False}, None)},
        {"load_kwargs": ({"map_location": "cpu"}, None)},
    ],
)
def test_ranks_that_load_with_other_arguments_are_an_error_on_all_and_the_next_load_works(
    runs, tmp_path, option
):
    ((name, values),) = option.items()

    def rank():
        run = runs.build()
        save_state(run, tmp_path / "c")
        runs.advance(run)
        before = runs.picture(run)
        text = ""
        if name == "map_location":  # two names of one place
            load_state(run, tmp_path / "c", map_location=values[run.world.rank])
        else:
            text = refused(load_state, run, tmp_path / "c", **{name: values[run.world.rank]})
            assert runs.picture(run) == before
        load_state(run, tmp_path / "c")
        assert run.step == 1
        return text

    first, second = run_threads(2, rank)
    assert first == second
    assert name == "map_location" or "the ranks disagree on the arguments of load_state: rank 0 has" in first


def test_ranks_at_different_steps_save_nothing_and_hear_of_it(runs, tmp_path):
    def rank():
        run = runs.build()
        save_state(run, tmp_path / "c")
        run.step = 4 + run.world.rank
        text = refused(save_state, run, tmp_path / "c")
        load_state(run, tmp_path / "c")
        return text, run.step

    results = run_threads(2, rank)
    assert [step for _, step in results] == [1, 1]
    for text, _ in results:
        assert "different steps (rank 0 has 4, rank 1 has 5)" in text


def test_ranks_that_got_unequal_numbers_of_batches_keep_each_its_step(runs, tmp_path):
    def rank():
        run = runs.build()
        run._dataloaders[0].position.apart = run.world.rank == 0
        run.step = 4 + run.world.rank
        save_state(run, tmp_path / "c")
        again = runs.build()
        load_state(again, tmp_path / "c")
        return again.step

    assert run_threads(2, rank) == [4, 5]


@pytest.mark.parametrize("name", ["progress_1.bin", "random_states_1.pkl", "both", "both of rank 0"])
def test_files_of_a_rank_that_are_of_another_step_are_refused_by_all(runs, tmp_path, name):
    def old():
        run = runs.build()
        save_state(run, tmp_path / "c")
        run.step = 7
        save_state(run, tmp_path / "other")

    run_threads(2, old)
    number = 0 if "rank 0" in name else 1
    names = [f"progress_{number}.bin", f"random_states_{number}.pkl"] if "both" in name else [name]
    for one in names:  # they have the size that was written
        (tmp_path / "other" / one).replace(tmp_path / "c" / one)

    def rank():
        run = runs.build(seed=3)
        before = runs.picture(run)
        text = refused(load_state, run, tmp_path / "c")
        assert runs.picture(run) == before
        return text

    for text in run_threads(2, rank):
        assert ("not of one save" if "both" in name else "is a mixture of two") in text
        assert "7" in text


def test_what_one_rank_misses_all_ranks_name(runs, tmp_path):
    run_threads(2, lambda: save_state(runs.build(), tmp_path / "c"))
    for gone in ("manifest.json", "random_states_1.pkl"):
        (tmp_path / "c" / gone).unlink()
    with pytest.warns(UserWarning, match="does not hold all of this run") as said:
        run_threads(2, lambda: load_state(runs.build(), tmp_path / "c"))
    texts = [str(one.message) for one in said if "does not hold all" in str(one.message)]
    assert [text.count("random_states_1.pkl") for text in texts] == [1, 1]


def test_a_step_that_only_some_ranks_know_is_that_of_all(runs, tmp_path):
    run_threads(2, lambda: save_state(runs.build(), tmp_path / "c"))
    # as of accelerate: the step is with the random generators
    for gone in ("manifest.json", "progress_0.bin", "progress_1.bin", "random_states_1.pkl"):
        (tmp_path / "c" / gone).unlink()

    def rank():
        run = runs.build()
        run.step = 9 + current_world().rank
        load_state(run, tmp_path / "c")
        return run.step

    with pytest.warns(UserWarning, match="progress_1"):
        assert run_threads(2, rank) == [1, 1]
