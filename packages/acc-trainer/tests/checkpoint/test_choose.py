"""A load takes the newest whole checkpoint, the same on every rank; what it cannot trust it does not touch the run for."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings

import pytest

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.checkpoint import CheckpointError, load_state, save_state
from acc_trainer.checkpoint import manifest as manifest_module


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _saved(runs, folder, saves=3):
    """A run that has saved so many times, and what it was like after each."""
    run, pictures = runs.build(folder), []
    for _ in range(saves):
        runs.advance(run)
        pictures.append(runs.picture(run))
        save_state(run)
    return run, pictures


@pytest.mark.parametrize("size", [1, 2, 3])
def test_changed_bytes_of_the_newest_lead_to_the_one_before_and_a_warning(runs, tmp_path, size):
    def rank():
        run, pictures = _saved(runs, tmp_path)
        if run.world.is_main:
            _flip(tmp_path / "checkpoints" / "checkpoint_2" / "optimizer.bin")
        run.world.comm.barrier()
        other = runs.build(tmp_path, seed=7)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_state(other, checksums=True)
            run.world.comm.barrier()  # threads share the list of warnings
        texts = [str(w.message) for w in said]
        return (runs.picture(other) == pictures[1], texts, os.path.basename(save_state(other)))

    results = run_threads(size, rank)
    assert all(same for same, _, _ in results)
    assert {name for *_, name in results} == {"checkpoint_3"}
    texts = [text for _, said, _ in results for text in said]
    wanted = "the bytes of optimizer.bin have changed, so the checkpoint before it is loaded: "
    assert any(wanted in text and "checkpoint_1 of step 3" in text for text in texts)


def test_a_folder_that_was_named_is_never_replaced_by_another(runs, tmp_path):
    run, _ = _saved(runs, tmp_path)
    newest = tmp_path / "checkpoints" / "checkpoint_2"
    _flip(newest / "model.safetensors")
    before = runs.picture(run)
    with pytest.raises(CheckpointError, match=r"the bytes of model\.safetensors have changed"):
        load_state(run, newest, checksums=True)
    assert runs.picture(run) == before


def test_when_all_have_changed_it_is_an_error_and_without_checksums_nobody_looks(runs, tmp_path):
    run, _ = _saved(runs, tmp_path, saves=2)
    for number in range(2):
        _flip(tmp_path / "checkpoints" / f"checkpoint_{number}" / "custom_checkpoint_0.pkl")
    before = runs.picture(run)
    with (
        pytest.warns(UserWarning, match="the checkpoint before it is loaded"),
        pytest.raises(CheckpointError, match=r"checkpoint_0 is not whole: the bytes of custom_checkpoint_0"),
    ):
        load_state(run, checksums=True)
    assert runs.picture(run) == before


def test_a_run_with_other_objects_does_not_fall_back_to_an_older_checkpoint_that_fits(runs, tmp_path):
    run, _ = _saved(runs, tmp_path, saves=1)
    run._custom_objects.append(runs.build()._custom_objects[0])
    save_state(run)
    with pytest.raises(CheckpointError, match="the custom of this run are not those"):
        load_state(runs.build(tmp_path))


def test_the_highest_step_wins_over_a_copy_with_a_higher_number(runs, tmp_path):
    _, pictures = _saved(runs, tmp_path)
    home = tmp_path / "checkpoints"
    shutil.copytree(home / "checkpoint_0", home / "checkpoint_50")
    other = runs.build(tmp_path, seed=7)
    load_state(other)
    assert runs.picture(other) == pictures[2]
    assert save_state(other).name == "checkpoint_51"


def test_only_numbered_ones_are_taken_without_a_name(runs, tmp_path):
    run, _ = _saved(runs, tmp_path, saves=1)
    home = tmp_path / "checkpoints"
    (home / "checkpoint_0").rename(home / "best")
    with pytest.raises(ValueError, match="there is no whole checkpoint in"):
        load_state(run)
    load_state(run, home / "best")


def test_a_newer_one_of_another_library_is_passed_over_with_a_warning_and_taken_where_it_is_alone(
    runs, tmp_path
):
    run, pictures = _saved(runs, tmp_path, saves=2)
    home = tmp_path / "checkpoints"
    (home / "checkpoint_1" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"checkpoint_1 has a higher number .* it has no manifest\.json"):
        load_state(run)
    assert runs.picture(run) == pictures[0]
    shutil.rmtree(home / "checkpoint_0")
    with pytest.warns(UserWarning, match=r"checkpoint_1 has no manifest\.json"):
        load_state(run)
    assert runs.picture(run)["weights"] == pictures[1]["weights"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("another step", "rank 0 has checkpoint_0 of step 2, rank 1 has checkpoint_0 of step 3"),
        ("another number", "rank 0 has checkpoint_0 of step 2, rank 1 has checkpoint_1 of step 2"),
        ("another manifest", r"the manifest\.json of checkpoint_0 is another on rank 1"),
        ("nothing", None),
    ],
)
def test_ranks_that_see_different_checkpoints_are_an_error_on_all(runs, tmp_path, other, said):
    for rank in range(2):
        run = runs.build(tmp_path / str(rank))
        for _ in range(2 if (rank, other) == (1, "another step") else 1):
            runs.advance(run)
        save_state(run)
    home = tmp_path / "1" / "checkpoints"
    if other == "another number":
        (home / "checkpoint_0").rename(home / "checkpoint_1")
    if other == "another manifest":
        path = home / "checkpoint_0" / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": 3.0}))
    if other == "nothing":
        shutil.rmtree(home)

    def load():
        run = runs.build(tmp_path / str(current_world().rank), seed=5)
        before = runs.picture(run)
        try:
            load_state(run)
        except (CheckpointError, ValueError) as error:
            return str(error), runs.picture(run) == before
        raise AssertionError("it loaded")

    results = run_threads(2, load)
    assert all(untouched for _, untouched in results)
    if said is None:
        assert "there is no whole checkpoint" in results[1][0]
        assert "rank 1 failed while looking for the checkpoint" in results[0][0]
    else:
        assert {text for text, _ in results} == {results[0][0]}
        with pytest.raises(CheckpointError, match=f"disagree on the checkpoint to load: {said}"):
            raise CheckpointError(results[0][0])


@pytest.mark.parametrize(
    ("number", "when"),
    [
        *((number, "looking at it") for number in (errno.EIO, errno.ESTALE, errno.EACCES)),
        *((number, "reading it") for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT)),
    ],
)
def test_a_disk_that_does_not_answer_is_an_error_that_names_the_file_and_the_run_goes_on(
    runs, tmp_path, monkeypatch, number, when
):
    def rank():
        run, _ = _saved(runs, tmp_path, saves=2)
        before = runs.picture(run)
        run.world.comm.barrier()
        if run.world.is_main:
            _break_disk(monkeypatch, "optimizer.bin", number, when)
        run.world.comm.barrier()
        with pytest.raises(CheckpointError, match=r"checkpoint_1/optimizer\.bin cannot be read: ") as error:
            load_state(run, checksums=True)
        run.world.comm.barrier()
        if run.world.is_main:
            monkeypatch.undo()
        run.world.comm.barrier()
        assert runs.picture(run) == before
        load_state(run)
        save_state(run)
        return str(error.value)

    assert all(os.strerror(number) in text for text in run_threads(2, rank))


def _break_disk(monkeypatch, name, number, when):
    """Whoever looks at, or reads, a file called `name` gets the error."""

    def breaking(call):
        def broken(path, *args, **kwargs):
            if os.path.basename(path) == name and "checkpoint_1" in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **kwargs)

        return broken

    if when == "looking at it":
        monkeypatch.setattr(os, "lstat", breaking(os.lstat))
    else:
        monkeypatch.setattr(manifest_module, "checksum", breaking(manifest_module.checksum))


def test_a_weights_file_that_another_program_put_beside_is_not_loaded(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    before = runs.picture(run)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    load_state(run, tmp_path / "c")
    (tmp_path / "c" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"weight": "evil.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors\.index\.json, which is not of this"):
        load_state(run, tmp_path / "c")
    assert runs.picture(run) == before


def test_going_back_says_what_a_later_load_without_a_name_would_take(runs, tmp_path):
    run, pictures = _saved(runs, tmp_path)
    home = tmp_path / "checkpoints"
    with pytest.warns(
        UserWarning, match=r"checkpoint_2 has step 4 and is newer than .*checkpoint_0 of step 2"
    ):
        load_state(run, home / "checkpoint_0")
    assert runs.picture(run) == pictures[0]
    assert save_state(run).name == "checkpoint_3"
    for number in (1, 2):
        shutil.rmtree(home / f"checkpoint_{number}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_state(run, home / "checkpoint_0")  # of the same step: nothing to say


def test_a_folder_that_may_only_be_read_can_be_loaded(runs, tmp_path):
    run = runs.build()
    save_state(run, tmp_path / "c")
    want, files = runs.picture(run), sorted(os.listdir(tmp_path / "c"))
    os.chmod(tmp_path / "c", 0o555)
    other = runs.build(seed=9)
    load_state(other, tmp_path / "c")
    os.chmod(tmp_path / "c", 0o755)
    assert runs.picture(other) == want
    assert sorted(os.listdir(tmp_path / "c")) == files
