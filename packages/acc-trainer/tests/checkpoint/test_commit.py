"""A target changes in one step; a death between any two file operations leaves the old or the new content."""

from __future__ import annotations

import os
import shutil

import pytest

from acc_trainer.checkpoint import commit, layout
from acc_trainer.checkpoint.layout import CheckpointError
from acc_trainer.checkpoint.listing import newest_whole
from acc_trainer.checkpoint.manifest import Manifest, check_whole, files_of, is_whole


def _stage(target, text):
    staging = commit.begin(target)
    (staging / "model.bin").write_text(text)
    return staging, Manifest(files=files_of(staging))


def _save(target, text):
    staging, manifest = _stage(target, text)
    commit.finish(staging, target, manifest)


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    return request.param


def test_a_new_and_an_existing_target_get_the_content(tmp_path, way):
    target = tmp_path / "run"
    for text in ("one", "two"):
        _save(target, text)
        check_whole(target, checksums=True)
        assert (target / "model.bin").read_text() == text
    assert os.listdir(tmp_path) == ["run"]


def test_files_that_no_checkpoint_wrote_stay_the_users(tmp_path, way):
    target = tmp_path / "run"
    (target / "logs").mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    (target / "model_card.md").write_text("mine too")
    (target / "pytorch_model.bin").write_text("of an older checkpoint")
    log = open(target / "logs" / "events", "w")  # noqa: SIM115  held open across the save, as a tracker does
    _save(target, "one")
    log.write("appended afterwards")
    log.close()
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "model_card.md").read_text() == "mine too"
    assert (target / "logs" / "events").read_text() == "appended afterwards"
    assert not (target / "pytorch_model.bin").exists()
    _save(target, "two")
    assert (target / "logs" / "events").read_text() == "appended afterwards"
    assert "notes.txt" not in check_whole(target).files


def test_folders_keep_their_modes_and_pipes_and_links_stay(tmp_path, way):
    target = tmp_path / "run"
    (target / "private" / "deep").mkdir(parents=True)
    (target / "empty").mkdir()
    for folder in ("private", "private/deep", "empty"):
        (target / folder).chmod(0o700)
    (target / "private" / "deep" / "notes").write_text("mine")
    (target / "private" / "link").symlink_to("deep/notes")
    if hasattr(os, "mkfifo"):
        os.mkfifo(target / "pipe")
    _save(target, "one")
    for folder in ("private", "private/deep", "empty"):
        assert (target / folder).stat().st_mode & 0o777 == 0o700, folder
    assert (target / "private" / "link").is_symlink()
    assert (target / "private" / "link").read_text() == "mine"
    assert not hasattr(os, "mkfifo") or (target / "pipe").is_fifo()


def test_where_files_cannot_have_two_names_they_are_copied_and_the_rest_is_moved(tmp_path, way, monkeypatch):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    target = tmp_path / "run"
    target.mkdir()
    (target / "notes").write_text("mine")
    if hasattr(os, "mkfifo"):
        os.mkfifo(target / "pipe")
    _save(target, "one")
    assert (target / "notes").read_text() == "mine"
    assert not hasattr(os, "mkfifo") or (target / "pipe").is_fifo()


def test_of_a_link_only_the_link_is_removed(tmp_path):
    _save(tmp_path / "elsewhere", "one")
    (tmp_path / "checkpoint_0").symlink_to("elsewhere")
    commit.remove(tmp_path / "checkpoint_0")
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert is_whole(tmp_path / "elsewhere")


def test_files_of_the_last_save_go_when_the_next_does_not_write_them(tmp_path, way):
    target = tmp_path / "run"
    staging, _ = _stage(target, "one")
    (staging / "custom_checkpoint_0.pkl").write_text("x")
    commit.finish(staging, target, Manifest(files=files_of(staging)))
    _save(target, "two")
    assert sorted(os.listdir(target)) == ["manifest.json", "model.bin"]


def test_leftovers_of_killed_saves_are_cleared_by_the_next(tmp_path):
    for name in (
        ".checkpoint_3.writing",
        ".checkpoint_2.removing",
        ".mine.writing",
        ".checkpoint_1.old",
        ".cache",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_1").mkdir()
    commit.begin(tmp_path / "checkpoint_4")
    assert sorted(os.listdir(tmp_path)) == [
        ".cache",
        ".checkpoint_4.writing",
        ".mine.writing",
        "checkpoint_1",
    ]


def test_what_a_death_between_two_renames_left_is_put_back(tmp_path):
    target = tmp_path / "run"
    _save(target, "one")
    os.rename(target, layout.parked_of(target))
    commit.begin(target)
    assert (target / "model.bin").read_text() == "one"


class _Death(BaseException):
    pass


def _die_at(monkeypatch, count):
    """Raise at the `count`-th call that changes the disk; from then on nothing changes it any more."""
    calls = [0]

    def guarded(original):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= count:
                raise _Death
            return original(*args, **kwargs)

        return call

    for module, name in [
        *((os, name) for name in ("rename", "mkdir", "fsync", "link", "unlink", "rmdir")),
        (shutil, "rmtree"),
        (commit, "_exchange"),
        (commit, "_write_synced"),
    ]:
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    return calls


def test_a_death_before_any_operation_leaves_old_or_new_and_the_next_save_works(tmp_path, way):
    seen, count = set(), 0
    while True:
        count += 1
        home = tmp_path / str(count)
        target = home / "checkpoint_0"
        _save(target, "old")
        with pytest.MonkeyPatch.context() as patch:
            calls = _die_at(patch, count)
            try:
                _save(target, "new")
                died = False
            except _Death:
                died = True
        if not died:
            assert calls[0] < count
            break
        found = newest_whole(home)
        check_whole(found, checksums=True)
        seen.add((found / "model.bin").read_text())
        _save(target, "next")
        assert (target / "model.bin").read_text() == "next"
        assert os.listdir(home) == ["checkpoint_0"]
    assert count > 8
    assert seen == {"old", "new"}


def test_a_death_while_removing_leaves_nothing_that_could_be_taken_for_a_checkpoint(tmp_path):
    for count in range(1, 6):
        target = tmp_path / str(count) / "checkpoint_0"
        _save(target, "old")
        with pytest.MonkeyPatch.context() as patch:
            _die_at(patch, count)
            try:
                commit.remove(target)
            except _Death:
                pass
        assert is_whole(target) or not target.exists()


def test_a_target_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is the current folder, or holds it, and cannot be replaced"):
        commit.check_target(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be replaced"):
        commit.check_target(tmp_path.parent)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        commit.check_target(tmp_path / "file")
    commit.check_target(tmp_path / "new")


def test_the_permissions_of_the_folder_are_kept(tmp_path):
    target = tmp_path / "run"
    target.mkdir(mode=0o700)
    _save(target, "one")
    assert target.stat().st_mode & 0o777 == 0o700


def test_a_file_that_took_the_place_of_the_target_meanwhile_stays(tmp_path, way):
    target = tmp_path / "run"
    _save(target, "one")
    staging, manifest = _stage(target, "two")
    shutil.rmtree(target)
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="became a file while the checkpoint was written"):
        commit.finish(staging, target, manifest)
    assert target.read_text() == "mine"
    assert (staging / "model.bin").read_text() == "two"


def test_a_link_that_leads_to_itself_is_no_target(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="a link that leads to itself"):
        commit.check_target(tmp_path / "loop")


def test_a_weights_file_that_somebody_put_into_a_checkpoint_is_not_in_the_next_one(tmp_path, way):
    target = tmp_path / "run"
    _save(target, "one")
    (target / "pytorch_model.bin").write_text("a stranger's")
    (target / "notes.txt").write_text("mine")
    assert not is_whole(target)
    with pytest.warns(
        UserWarning, match=r"pytorch_model\.bin was not written by save_state .*: it is not kept"
    ):
        _save(target, "two")
    assert is_whole(target)
    assert sorted(os.listdir(target)) == ["manifest.json", "model.bin", "notes.txt"]
