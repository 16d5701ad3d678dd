"""A folder that another process replaces or deletes while it is loaded is noticed: the run holds one save, or an error says that it does not."""

from __future__ import annotations

import os
import shutil

import pytest

from acc_ops.testing import run_threads
from acc_trainer.checkpoint import CheckpointError, commit, load_state, save_state


def _saves(runs, tmp_path, count):
    """What successive saves of one run hold, and folders with them."""
    run, pictures = runs.build(), []
    for number in range(count):
        runs.advance(run)
        pictures.append(runs.picture(run))
        save_state(run, tmp_path / f"save_{number}")
    return pictures


def _replace(folder, tmp_path, number):
    """As a save does it: in one step."""
    assert commit._exchange(tmp_path / f"save_{number}", folder)
    shutil.rmtree(tmp_path / f"save_{number}")


def _at(run, method, do):
    """Do something just before the strategy opens the first model or optimizer, or just before it loads what it opened."""
    step, _, kind = method.partition("_")
    original, done = getattr(run.strategy, f"open_{kind}"), []

    def once(call):
        def called(*args, **kwargs):
            if not done:
                done.append(do())
            return call(*args, **kwargs)

        return called

    opening = once(original) if step == "open" else lambda *args, **kwargs: once(original(*args, **kwargs))
    setattr(run.strategy, f"open_{kind}", opening)


@pytest.mark.parametrize("method", ["open_optimizer", "open_model", "load_model", "load_optimizer"])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_folder_replaced_at_any_point_is_loaded_as_the_new_one(runs, tmp_path, method, checksums):
    pictures = _saves(runs, tmp_path, 2)
    folder = tmp_path / "c"
    os.rename(tmp_path / "save_0", folder)
    run = runs.build(seed=5)
    _at(run, method, lambda: _replace(folder, tmp_path, 1))
    load_state(run, folder, checksums=checksums)
    assert runs.picture(run) == pictures[1]


def test_a_folder_replaced_after_the_last_object_was_loaded_is_loaded_again(runs, tmp_path):
    pictures = _saves(runs, tmp_path, 2)
    folder = tmp_path / "c"
    os.rename(tmp_path / "save_0", folder)
    run = runs.build(seed=5)
    custom, loaded = run._custom_objects[0], []
    original = custom.load_state_dict

    def load(state):
        original(state)
        loaded.append(state)
        if len(loaded) == 1:
            _replace(folder, tmp_path, 1)

    custom.load_state_dict = load
    load_state(run, folder)
    assert len(loaded) == 2
    assert runs.picture(run) == pictures[1]


def test_a_folder_replaced_again_and_again_is_an_error(runs, tmp_path):
    _saves(runs, tmp_path, 7)
    folder = tmp_path / "c"
    os.rename(tmp_path / "save_0", folder)
    run = runs.build(seed=5)
    rounds = []
    run._load_model_state_pre_hook["other"] = lambda *_: (
        rounds.append(1),
        _replace(folder, tmp_path, len(rounds)),
    )
    before = runs.picture(run)
    with pytest.raises(CheckpointError, match="was replaced or deleted by another save while it was loaded"):
        load_state(run, folder)
    assert len(rounds) == 5
    assert runs.picture(run) == before  # each time before anything was touched


def test_a_checkpoint_pruned_while_it_is_loaded_gives_way_to_the_newest(runs, tmp_path):
    writer = runs.build(tmp_path, limit=1)
    save_state(writer)
    run = runs.build(tmp_path, seed=5, limit=1)

    def save_and_prune():
        runs.advance(writer)
        save_state(writer)

    _at(run, "load_optimizer", save_and_prune)
    load_state(run)
    assert runs.picture(run) == runs.picture(writer)
    assert save_state(run).name == "checkpoint_2"


def test_what_one_rank_notices_all_ranks_load_again(runs, tmp_path):
    pictures = _saves(runs, tmp_path, 2)
    folder = tmp_path / "c"
    os.rename(tmp_path / "save_0", folder)

    def rank():
        run = runs.build(seed=5)
        if run.world.rank == 1:
            _at(run, "load_optimizer", lambda: _replace(folder, tmp_path, 1))
        load_state(run, folder)
        return runs.picture(run)["weights"], runs.picture(run)["optimizers"]

    with pytest.warns(UserWarning, match="saved by 1 processes, now there are 2"):
        results = run_threads(2, rank)
    for weights, optimizers in results:
        assert (weights, optimizers) == (pictures[1]["weights"], pictures[1]["optimizers"])


def test_an_error_that_has_nothing_to_do_with_another_save_is_raised_at_once(runs, tmp_path):
    _saves(runs, tmp_path, 1)
    run = runs.build()
    calls = []

    def fail(*_):
        calls.append(1)
        raise RuntimeError("of the hook")

    run._load_model_state_pre_hook["failing"] = fail
    with pytest.raises(RuntimeError, match="of the hook"):
        load_state(run, tmp_path / "save_0")
    assert calls == [1]
