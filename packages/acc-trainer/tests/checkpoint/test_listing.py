"""A listing says of every checkpoint whether it is whole and why not, reads no tensors, and prints as a table."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from acc_ops.testing import run_threads
from acc_plugins import CheckpointPolicy
from acc_trainer.checkpoint import (
    CheckpointError,
    load_state,
    look,
    look_in_project,
    newest_whole,
    save_state,
)
from acc_trainer.checkpoint import manifest as manifest_module
from acc_trainer.checkpoint.manifest import Manifest, files_of


def _whole(folder, **known):
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"x" * 1500)
    (folder / "manifest.json").write_text(Manifest(files=files_of(folder), **known).to_text())
    return folder


def test_everything_of_a_saved_run_is_told(runs, tmp_path):
    run = runs.build(tmp_path)
    for metric in (0.5, None, 0.25):
        runs.advance(run)
        save_state(run, metric=metric)
    found = look(tmp_path / "checkpoints")
    assert [(one.number, one.iteration, one.step) for one in found] == [(0, 0, 2), (1, 1, 3), (2, 2, 4)]
    assert [one.metric for one in found] == [0.5, None, 0.25]
    assert all(one.whole and one.world_size == 1 and 0 <= one.age_s < 60 for one in found)
    one = found[0]
    assert one.bytes == sum(f.stat().st_size for f in one.path.iterdir() if f.name != "manifest.json")
    assert found.newest is found[-1]
    assert (found.best(), found.best("max")) == (found[2], found[0])
    with pytest.raises(ValueError, match="'min' or 'max', got 'least'"):
        found.best("least")


def test_the_best_of_a_project_is_what_its_policy_means(runs, tmp_path):
    run = runs.build(tmp_path, keep=CheckpointPolicy(last=1, best=1, mode="max"))
    for metric in (0.5, 0.9, 0.7):
        runs.advance(run)
        save_state(run, metric=metric)
    found = look_in_project(run.project_configuration, None)
    assert [one.metric for one in found] == [0.9, 0.7]
    assert found.best().metric == found.check().best().metric == 0.9
    assert found.best("min").metric == 0.7
    assert look_in_project(run.project_configuration, tmp_path / "checkpoints").best().metric == 0.9
    assert look(tmp_path / "checkpoints").best().metric == 0.7  # who looks by hand says what is good


def test_newest_means_step_then_number_then_time_and_numbered_ones_go_first(tmp_path):
    _whole(tmp_path / "checkpoint_1", step=9)
    _whole(tmp_path / "checkpoint_2", step=5)
    assert newest_whole(tmp_path).name == "checkpoint_1"
    _whole(tmp_path / "checkpoint_3", step=9)
    assert newest_whole(tmp_path).name == "checkpoint_3"
    _whole(tmp_path / "best", step=100, saved_at=9e9)
    _whole(tmp_path / "checkpoint_007", step=100)  # not a name that a save gives
    assert newest_whole(tmp_path).name == "checkpoint_3"
    for number in range(1, 4):
        shutil.rmtree(tmp_path / f"checkpoint_{number}")
    assert newest_whole(tmp_path).name == "best"


def test_what_is_not_whole_is_listed_with_the_reason_and_other_things_are_not_listed(tmp_path):
    _whole(tmp_path / "checkpoint_0", step=3)
    (_whole(tmp_path / "checkpoint_1", step=4) / "a.bin").unlink()
    (tmp_path / "checkpoint_2").mkdir()
    (tmp_path / "checkpoint_2" / "model.safetensors").write_bytes(b"12")
    (tmp_path / ".checkpoint_3.writing").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "checkpoint_4").write_text("a file")
    (tmp_path / "checkpoint_5").symlink_to("nowhere")
    found = look(tmp_path)
    table = str(found).splitlines()
    assert len(table) == 5
    assert [line.split()[0] for line in table[1:]] == [one.path.name for one in found]
    rows = {line.split()[0]: line for line in table}
    assert rows["checkpoint_0"].endswith("1.46 KB  whole, the newest")
    assert rows["checkpoint_1"].endswith("not whole: a.bin is missing")
    assert rows["checkpoint_2"].endswith("2 bytes  not whole: it has no manifest.json")
    assert rows[".checkpoint_3.writing"].endswith("not whole: a save is writing it, or was killed")
    assert repr(found) == f"<4 checkpoints in {tmp_path}, 1 whole>"
    assert str(look(tmp_path / "notes")) == f"no checkpoints in {tmp_path / 'notes'}"
    assert len(look(tmp_path / "missing")) == 0


def test_listing_opens_only_manifests_and_check_reads_every_file(tmp_path, monkeypatch):
    for number in range(3):
        _whole(tmp_path / f"checkpoint_{number}")
    read = []
    original = manifest_module.checksum
    monkeypatch.setattr(manifest_module, "checksum", lambda path: read.append(path) or original(path))
    found = look(tmp_path)
    str(found)
    assert read == []
    content = (tmp_path / "checkpoint_1" / "a.bin").read_bytes()
    (tmp_path / "checkpoint_1" / "a.bin").write_bytes(content[:-1] + b"y")
    assert all(one.whole for one in look(tmp_path))
    checked = found.check()
    assert len(read) == 3
    assert [one.whole for one in checked] == [True, False, True]
    assert "the bytes of a.bin have changed" in str(checked)
    assert all(one.whole for one in found)  # what was seen before stays as it was


def test_a_folder_that_cannot_be_read_is_an_error_and_not_empty(tmp_path, monkeypatch):
    from pathlib import Path

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: Permission denied"):
        look(tmp_path)


def test_the_best_one_survives_a_resume_and_can_be_loaded(runs, tmp_path):
    from acc_plugins import CheckpointPolicy

    run = runs.build(tmp_path, keep=CheckpointPolicy(last=1, best=1))
    pictures = []
    for metric in (0.9, 0.1):
        runs.advance(run)
        pictures.append(runs.picture(run))
        save_state(run, metric=metric)
    other = runs.build(tmp_path, seed=3, keep=CheckpointPolicy(last=1, best=1))
    load_state(other)
    for metric in (0.5, 0.7, float("nan")):
        runs.advance(other)
        if metric == metric:
            save_state(other, metric=metric)
        else:
            with pytest.warns(
                UserWarning, match="the metric is nan, so this checkpoint is not among the best"
            ):
                save_state(other, metric=metric)
    found = look(tmp_path / "checkpoints")
    assert [(one.number, one.metric) for one in found] == [(1, 0.1), (4, None)]
    with pytest.warns(UserWarning, match=r"checkpoint_4 has step 6 and is newer"):
        load_state(other, found.best().path)
    assert runs.picture(other) == pictures[1]


def test_ages_and_sizes_are_short(tmp_path):
    for number, age in enumerate((90000 * 3, 7300, 200, 30)):
        _whole(tmp_path / f"checkpoint_{number}", step=number, saved_at=time.time() - age)
    shown = [line.split()[5:7] for line in str(look(tmp_path)).splitlines()[1:]]
    assert shown == [["3", "d"], ["2", "h"], ["3", "min"], ["30", "s"]]


def test_a_linked_checkpoint_counts_as_the_users_choice(tmp_path):
    _whole(tmp_path / "elsewhere" / "c", step=7)
    os.makedirs(tmp_path / "home")
    (tmp_path / "home" / "checkpoint_0").symlink_to(tmp_path / "elsewhere" / "c")
    assert newest_whole(tmp_path / "home").name == "checkpoint_0"


def test_a_metric_that_ranks_do_not_share_is_an_error_on_all(runs, tmp_path):
    def rank():
        run = runs.build(tmp_path)
        with pytest.raises(CheckpointError, match=r"disagree on .*the metric \(gather it first\)"):
            save_state(run, metric=0.5 + run.world.rank)
        return save_state(run, metric=0.5)

    assert {os.path.basename(folder) for folder in run_threads(2, rank)} == {"checkpoint_0"}


def test_the_accelerator_lists_its_own_folder_or_another(tmp_path):
    from acc_plugins import ProjectConfiguration
    from acc_trainer import Accelerator

    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    accelerator.save_state(metric=0.5)
    accelerator.save_state(metric=0.25)
    assert [one.metric for one in accelerator.checkpoints()] == [0.5, 0.25]
    assert len(accelerator.checkpoints(tmp_path)) == 0
    project.automatic_checkpoint_naming = False
    with pytest.raises(ValueError, match=r"checkpoints\(\) needs a folder"):
        accelerator.checkpoints()
