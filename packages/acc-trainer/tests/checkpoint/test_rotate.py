"""Only numbered folders count and go, never the newest and never while it is not whole; the numbering goes on."""

from __future__ import annotations

import os

from acc_plugins import CheckpointPolicy
from acc_trainer.checkpoint.manifest import Manifest, files_of
from acc_trainer.checkpoint.rotate import next_number, prune


def _whole(folder, **known):
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "manifest.json").write_text(Manifest(files=files_of(folder), **known).to_text())
    return folder


def test_only_numbered_folders_count_and_only_they_go(tmp_path):
    for name in ("checkpoint_0", "checkpoint_1", "checkpoint_2", "best", "checkpoint_x", "checkpoint_01"):
        _whole(tmp_path / name)
    (tmp_path / ".checkpoint_3.writing").mkdir()
    gone = prune(tmp_path, tmp_path / "checkpoint_2", CheckpointPolicy(last=1))
    assert [path.name for path in gone] == ["checkpoint_0", "checkpoint_1"]
    left = {"best", "checkpoint_2", "checkpoint_x", "checkpoint_01", ".checkpoint_3.writing"}
    assert set(os.listdir(tmp_path)) == left


def test_nothing_goes_without_a_policy_and_while_the_newest_is_not_whole(tmp_path):
    for number in range(3):
        _whole(tmp_path / f"checkpoint_{number}")
    newest = tmp_path / "checkpoint_2"
    assert prune(tmp_path, newest, None) == []
    (newest / "a.bin").unlink()
    assert prune(tmp_path, newest, CheckpointPolicy(last=1)) == []
    assert len(os.listdir(tmp_path)) == 3


def test_what_cannot_be_judged_is_left_alone(tmp_path):
    (tmp_path / "checkpoint_0").mkdir()
    (tmp_path / "checkpoint_0" / "manifest.json").write_text('{"format": 99}')  # of a later version
    (tmp_path / "checkpoint_1").mkdir()
    _whole(tmp_path / "checkpoint_2")
    prune(tmp_path, tmp_path / "checkpoint_2", CheckpointPolicy(last=1))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_0", "checkpoint_2"]


def test_the_next_number_follows_the_highest_folder(tmp_path):
    assert next_number(tmp_path / "missing") == 0
    (tmp_path / "checkpoint_7").mkdir()
    assert next_number(tmp_path) == 8
    assert next_number(tmp_path, 12) == 12
    (tmp_path / "checkpoint_8").write_text("a file")
    (tmp_path / "checkpoint_9").symlink_to("nowhere")
    (tmp_path / "checkpoint_011").mkdir()
    assert next_number(tmp_path) == 10
