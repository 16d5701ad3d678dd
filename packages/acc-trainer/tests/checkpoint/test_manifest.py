"""A folder is whole when everything its manifest lists is there in its size; the newest whole one is found."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from acc_plugins.states.whole import check_no_checkpoint, is_foreign
from acc_trainer.checkpoint import manifest as manifests
from acc_trainer.checkpoint.layout import CheckpointError, NotWholeError
from acc_trainer.checkpoint.listing import newest_whole
from acc_trainer.checkpoint.manifest import (
    Manifest,
    check_bytes,
    check_whole,
    files_of,
    is_whole,
    metric_of,
    read_manifest,
)


def _whole(folder, *, saved_at=0.0, step=0):
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "sub" / "b.bin").write_bytes(b"")
    manifest = Manifest(step=step, saved_at=saved_at, files=files_of(folder))
    (folder / "manifest.json").write_text(manifest.to_text())
    return folder


def test_a_manifest_is_read_back_as_it_was_written(tmp_path):
    folder = _whole(tmp_path / "c", saved_at=1.5, step=7)
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.saved_at, manifest.format) == (7, 1.5, 1)
    assert manifest.files["a.bin"]["bytes"] == 5
    assert set(manifest.files) == {"a.bin", "sub/b.bin"}
    assert is_whole(folder)


def test_a_missing_a_short_and_a_changed_file_are_named(tmp_path):
    folder = _whole(tmp_path / "c")
    (folder / "a.bin").write_bytes(b"1234X")
    check_whole(folder)
    with pytest.raises(CheckpointError, match=r"not whole: the bytes of a\.bin have changed"):
        check_whole(folder, checksums=True)
    (folder / "a.bin").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"not whole: a\.bin has 3 bytes, 5 were written"):
        check_whole(folder)
    (folder / "sub" / "b.bin").unlink()
    (folder / "a.bin").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"not whole: sub/b\.bin is missing"):
        check_whole(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}', '{"format": "one"}'])
def test_a_manifest_that_is_none_is_not_whole(tmp_path, text):
    folder = _whole(tmp_path / "c")
    (folder / "manifest.json").write_text(text)
    assert not is_whole(folder)


@pytest.mark.parametrize(
    "edit",
    [
        *({"format": True}, {"format": 0}, {"files": None}, {"files": []}, {"files": {"a.bin": {}}}),
        *(
            {"files": {"a.bin": 5}},
            {"files": {"a.bin": {"bytes": 5}}},
            {"files": {"a\0b": {"bytes": 1, "crc32": 0}}},
        ),
        *(
            {"objects": None},
            {"objects": {"models": [{}]}},
            {"objects": [1]},
            {"world_size": "x"},
            {"step": "x"},
        ),
        *({"epoch": [1]}, {"iteration": 1.5}, {"saved_at": "now"}, {"versions": 3}),
    ],
)
def test_an_edited_manifest_is_not_whole_and_the_newest_other_one_is_taken(tmp_path, edit):
    _whole(tmp_path / "checkpoint_1")
    path = _whole(tmp_path / "checkpoint_2") / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(CheckpointError, match="is not whole"):
        check_whole(tmp_path / "checkpoint_2")
    assert not is_whole(tmp_path / "checkpoint_2")
    assert newest_whole(tmp_path).name == "checkpoint_1"


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        *(('{"name": "app"}', True), ("[]", True), ("# notes", True), (None, False), ("", False)),
        *(
            (Manifest().to_text(), False),
            (Manifest().to_text()[:40], False),
            ('{"format": 1, "files": []}', True),
        ),
    ],
)
def test_a_manifest_of_somebody_elses_is_told_from_ours_whole_or_half(tmp_path, text, foreign):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert is_foreign(tmp_path) is foreign


def test_several_processes_share_the_reading_and_every_file_is_read_once(tmp_path, monkeypatch):
    from acc_trainer.checkpoint import manifest as module

    folder = _whole(tmp_path / "c")
    found = read_manifest(folder)
    seen = []
    original = module.checksum
    monkeypatch.setattr(module, "checksum", lambda path: seen.append(path.name) or original(path))
    for part in range(3):
        check_bytes(folder, found, part, 3)
    assert sorted(seen) == ["a.bin", "b.bin"]


def test_a_later_format_is_refused_with_the_remedy(tmp_path):
    folder = _whole(tmp_path / "c")
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="format 99, this version reads up to 1: upgrade"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "a/../../b", "..", "C:/x", "c:x", "\\\\host\\x", "a\\..\\b"]
)
def test_a_path_cannot_leave_the_folder(tmp_path, name):
    folder = _whole(tmp_path / "c")
    (folder / "manifest.json").write_text(
        json.dumps({"format": 1, "files": {name: {"bytes": 1, "crc32": 0}}})
    )
    with pytest.raises(CheckpointError, match="outside of the folder"):
        read_manifest(folder)


def test_the_newest_whole_folder_is_found_whatever_else_lies_there(tmp_path):
    for number in (2, 9, 10, 11):
        _whole(tmp_path / f"checkpoint_{number}", saved_at=100.0 - number)
    (tmp_path / "checkpoint_11" / "a.bin").unlink()
    (tmp_path / "checkpoint_99").mkdir()
    (tmp_path / "checkpoint_100").write_text("a file")
    _whole(tmp_path / ".checkpoint_12.writing")
    _whole(tmp_path / "best", saved_at=1000.0)
    assert newest_whole(tmp_path).name == "checkpoint_10"


def test_among_names_of_the_users_own_the_one_saved_last_is_newest(tmp_path):
    _whole(tmp_path / "z", saved_at=1.0)
    _whole(tmp_path / "a", saved_at=2.0)
    assert newest_whole(tmp_path).name == "a"


def test_a_checkpoint_parked_between_two_renames_is_found(tmp_path):
    _whole(tmp_path / "checkpoint_1")
    _whole(tmp_path / ".checkpoint_2.old")
    assert newest_whole(tmp_path).name == ".checkpoint_2.old"
    _whole(tmp_path / "checkpoint_2")
    assert newest_whole(tmp_path).name == "checkpoint_2"


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert newest_whole(tmp_path) is None
    assert newest_whole(tmp_path / "missing") is None


@pytest.mark.parametrize("name", ["", ".", "./a.bin", "sub//b.bin", "sub/", "a\0b", "manifest.json"])
def test_a_name_that_no_save_gives_is_refused(tmp_path, name):
    folder = _whole(tmp_path / "c")
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][name] = {"bytes": 1, "crc32": 0}
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has been changed: it names a file"):
        check_whole(folder)


def test_what_could_not_be_read_back_is_not_written():
    with pytest.raises(CheckpointError, match="the new checkpoint names a file outside of the folder"):
        Manifest(files={"a\\b": {"bytes": 1, "crc32": 0}}).to_text()


def test_a_link_may_lead_to_a_file_in_the_folder_but_not_out_of_it(tmp_path):
    folder = _whole(tmp_path / "c")
    (folder / "a.bin").rename(folder / "kept")
    (folder / "a.bin").symlink_to("kept")
    check_whole(folder, checksums=True)
    (folder / "a.bin").unlink()
    (tmp_path / "outside").write_bytes(b"12345")
    (folder / "a.bin").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"not whole: a\.bin leads out of the folder, to .*outside"):
        check_whole(folder)
    _whole(tmp_path / "other")
    (folder / "a.bin").unlink()
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "sub" / "b.bin").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to(tmp_path / "other" / "sub")
    with pytest.raises(CheckpointError, match=r"not whole: sub/b\.bin leads out of the folder"):
        check_whole(folder)


def test_a_checkpoint_that_is_reached_by_a_link_is_whole(tmp_path):
    _whole(tmp_path / "c")
    (tmp_path / "link").symlink_to("c")
    assert is_whole(tmp_path / "link")


def test_a_manifest_that_leads_out_is_no_manifest(tmp_path):
    folder, other = _whole(tmp_path / "c"), _whole(tmp_path / "other")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(other / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json leads out of the folder"):
        read_manifest(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe", "too large", "nested", "twice", "long number"])
def test_a_manifest_made_to_choke_a_reader_is_refused_at_once(tmp_path, kind):
    path = _whole(tmp_path / "c") / "manifest.json"
    text = path.read_text()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    elif kind == "too large":
        with open(path, "wb") as file:
            file.truncate(65 << 20)
    elif kind == "nested":
        path.write_text('{"format": ' + "[" * 100_000)
    elif kind == "twice":
        path.write_text(text.replace('"format": 1', '"format": 1, "step": 7'))
    else:
        path.write_text('{"format": ' + "9" * 5000 + "}")
    with pytest.raises(CheckpointError, match="is not whole: "):
        check_whole(tmp_path / "c")


@pytest.mark.parametrize(("given", "kept"), [(None, None), (3, 3.0), (0.5, 0.5), (True, 1.0), ("0.25", 0.25)])
def test_a_metric_is_one_number(given, kept):
    assert metric_of(given) == kept


def test_a_metric_that_is_none_is_refused_and_one_that_says_nothing_is_left_out():
    import torch

    assert metric_of(torch.tensor([0.5])) == 0.5
    for wrong in ("low", [1.0], {"loss": 1.0}, torch.zeros(2)):
        with pytest.raises(TypeError, match="metric must be one number, got "):
            metric_of(wrong)
    for nothing in ("nan", float("-inf")):
        with pytest.warns(UserWarning, match="is not among the best"):
            assert metric_of(nothing) is None


@pytest.mark.parametrize(
    "wrong", [{"step": -5}, {"epoch": -1}, {"epoch": 2.0}, {"metric": float("inf")}, {"saved_at": 10**400}]
)
def test_a_value_that_a_reader_would_refuse_is_not_written(wrong):
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        Manifest(**wrong).to_text()


def test_every_finite_metric_is_read_back(tmp_path):
    for metric in (sys.float_info.max, -sys.float_info.max, 5e-324):
        (tmp_path / "manifest.json").write_text(Manifest(metric=metric_of(metric)).to_text())
        assert check_whole(tmp_path).metric == metric
    with pytest.raises(TypeError, match="metric must be one number, got int: larger than any float"):
        metric_of(10**400)


def test_weights_for_others_are_not_written_into_a_checkpoint(tmp_path):
    check_no_checkpoint(tmp_path, "save_model")
    (tmp_path / "manifest.json").write_text('{"name": "a web application"}')
    check_no_checkpoint(tmp_path, "save_model")
    (tmp_path / "manifest.json").write_text(Manifest().to_text())
    with pytest.raises(CheckpointError, match="save_model would spoil it: name another folder"):
        check_no_checkpoint(tmp_path, "save_model")


@pytest.mark.parametrize(("last", "said"), [("a.bin", "being deleted"), ("manifest.json", "has no manifest")])
def test_a_folder_that_is_deleted_while_it_is_looked_at_is_not_whole(tmp_path, monkeypatch, last, said):
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "manifest.json").write_text(Manifest(files=files_of(folder)).to_text())
    size_of = manifests._size_of

    def then_it_goes(where, name):
        size = size_of(where, name)
        if name == last:
            shutil.rmtree(folder)  # as another run's pruning does
        return size

    monkeypatch.setattr(manifests, "_size_of", then_it_goes)
    with pytest.raises(NotWholeError, match=said):
        check_whole(folder)
    assert newest_whole(tmp_path) is None
