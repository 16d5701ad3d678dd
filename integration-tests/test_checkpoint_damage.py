"""A checkpoint that was damaged on the disk is refused, with the file and the run untouched; one that is being replaced is loaded whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marked_run import MarkedRun

from acc_trainer.checkpoint import CheckpointError

SAVED, NOW = 10, 5  # marks
LOADS = 40
HOW = ["flipped", "zeroed", "cut off", "with a gap", "with more in it", "deleted"]
FILES = [
    "manifest.json",
    "model.safetensors",
    "model_1.safetensors",
    "optimizer.bin",
    "optimizer_1.bin",
    "scheduler.bin",
    "custom_checkpoint_0.pkl",
    "random_states_0.pkl",
    "progress_0.bin",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run, and the folder in which it has saved `SAVED`."""
    folder = tmp_path_factory.mktemp("run")
    run = MarkedRun(folder, named=True)
    run.mark(SAVED)
    run.save()
    return run, folder / "latest"


def _state(run):
    """All that a load could touch, as plain values."""
    things = (*run.models, *run.optimizers, run.schedule, run.counter)
    return (
        [_plain(thing.state_dict()) for thing in things],
        run.accelerator.step,
        random.getstate(),
        torch.get_rng_state().tolist(),
    )


def _plain(node):
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in node]
    return (str(node.dtype), node.tolist()) if isinstance(node, torch.Tensor) else repr(node)


def _damaged(content, how, at, length, byte):
    """The bytes of a file after `length` bytes from `at` on were changed; None when it is deleted."""
    before, there, after = content[:at], content[at : at + length], content[at + length :]
    return {
        "flipped": before + bytes(old ^ byte for old in there) + after,
        "zeroed": before + bytes(len(there)) + after,
        "cut off": before,
        "with a gap": before + after,
        "with more in it": before + bytes([byte]) * length + there + after,
        "deleted": None,
    }[how]


def _break(folder, name, how, at, length, byte):
    """Damage a file; whether that changed it. `at` goes from 0 to 1, over the file."""
    content = (folder / name).read_bytes()
    changed = _damaged(content, how, min(int(at * len(content)), len(content) - 1), length, byte)
    (folder / name).unlink()
    if changed is not None:
        (folder / name).write_bytes(changed)
    return changed != content


def _load(run, folder):
    """Load over other values; the error, which must have left the run as it was, or None."""
    run.mark(NOW)
    before = _state(run)
    try:
        run.accelerator.load_state(str(folder), checksums=True)
    except CheckpointError as error:
        changed = _state(run) != before
        if changed:
            raise AssertionError("a load that was refused has changed the run") from error
        return str(error)
    return None


def test_the_checkpoint_consists_of_the_files_that_are_damaged_below(saved):
    assert sorted(path.name for path in saved[1].iterdir()) == sorted(FILES)


@pytest.fixture
def broken(saved, tmp_path):
    """Makes copies of the folder, each in place of the last."""

    def copy():
        shutil.rmtree(tmp_path / "latest", ignore_errors=True)
        return shutil.copytree(saved[1], tmp_path / "latest")

    return copy


AGAIN = [HealthCheck.function_scoped_fixture]  # `broken` begins anew by itself


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25, suppress_health_check=AGAIN)
@given(
    how=st.sampled_from(HOW),
    at=st.floats(0.0, 1.0),
    length=st.integers(1, 200),
    byte=st.integers(1, 255),
)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_was_changed_anywhere_is_refused_and_named_and_nothing_was_touched(
    saved, broken, name, how, at, length, byte
):
    run, folder = saved[0], broken()
    changed = _break(folder, name, how, at, length, byte)
    said = _load(run, folder)
    if said is None:
        assert not changed or name == "manifest.json", "a changed file was loaded"
        assert run.value() == SAVED
    elif name == "manifest.json":  # whose checksums may be those of another file now
        assert str(folder) in said
    else:
        assert [file for file in FILES if file in said] == [name]


@pytest.mark.parametrize("name", FILES[1:])
@settings(max_examples=15, suppress_health_check=AGAIN)
@given(how=st.sampled_from(["cut off", "with a gap", "deleted"]), at=st.floats(0.0, 1.0))
@pytest.mark.filterwarnings("ignore")
def test_without_a_manifest_a_file_with_missing_bytes_is_an_error_or_its_values_are_right(
    saved, broken, name, how, at
):
    """Such a checkpoint is accelerate's: nobody knows its sizes, so each file is what its own format says."""
    run, folder = saved[0], broken()
    (folder / "manifest.json").unlink()
    _break(folder, name, how, at, 50, 0)
    said = _load(run, folder)
    if said is not None:
        assert str(folder) in said
        return
    run.accelerator.step = SAVED  # this and the generators may be missing
    run.seed(SAVED)
    assert run.value() == SAVED


def _save_for_ever(folder, named, began):
    torch.set_num_threads(1)
    run = MarkedRun(folder, named=named)
    mark = run.load()
    while True:
        mark += 1
        run.mark(mark)
        run.save()
        began.set()


@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("named", [True, False], ids=["over one name", "automatic names, one stays"])
@pytest.mark.filterwarnings("ignore")
def test_a_load_beside_a_process_that_saves_there_is_of_one_save(tmp_path, named):
    run = MarkedRun(tmp_path, named=named)
    run.mark(SAVED)
    run.save()
    fork = multiprocessing.get_context("fork")
    began = fork.Event()
    saver = fork.Process(target=_save_for_ever, args=(tmp_path, named, began))
    saver.start()
    try:
        assert began.wait(60)
        found = [_load_beside(run) for _ in range(LOADS)]
    finally:
        assert saver.exitcode is None, "the other process cannot save"
        saver.kill()
        saver.join()
    marks = [mark for mark in found if mark is not None]
    assert len(marks) > LOADS / 2
    assert marks == sorted(marks), "an older checkpoint was loaded after a newer one"
    assert len(set(marks)) > 1, "nothing was saved between the loads: this test has shown nothing"


def _load_beside(run):
    """The mark of the checkpoint that was loaded; None for one that was gone by then."""
    try:
        return run.load()
    except CheckpointError:
        return None
