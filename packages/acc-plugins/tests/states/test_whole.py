"""Checkpoints of save_state are known by their manifest, whole or half, and so is what is a part of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acc_plugins.states.whole import CheckpointError, check_no_checkpoint, check_no_part, is_foreign

OURS = json.dumps({"format": 1, "world_size": 1, "files": {"shards/a": {"bytes": 1}, "b.bin": {}}}, indent=1)


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        *((OURS, False), (OURS[:14], False), (OURS[:3], False), ("", False), (None, False)),
        *(("[]", True), ('{"name": "app"}', True), ("# notes", True), ('{"format": 1}', True)),
    ],
)
def test_only_a_manifest_that_no_checkpoint_wrote_is_foreign(
    tmp_path: Path, text: str | None, foreign: bool
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert is_foreign(tmp_path) is foreign
    if text is None or foreign:
        check_no_checkpoint(tmp_path, "writing")
        check_no_part(tmp_path / "anything", "writing")
    else:
        with pytest.raises(CheckpointError, match=r"is a checkpoint of save_state, writing would spoil it"):
            check_no_checkpoint(tmp_path, "writing")


@pytest.mark.parametrize("name", ["shards", "shards/a", "b.bin"])
def test_what_a_manifest_lists_or_is_in_a_folder_that_it_lists_is_a_part(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(OURS)
    with pytest.raises(
        CheckpointError, match=rf"{name} is a part of the checkpoint .*, removing would spoil it"
    ):
        check_no_part(tmp_path / name, "removing")


@pytest.mark.parametrize("name", ["merged", "shard", "b.bin.old", "shards_2/a"])
def test_what_lies_beside_it_is_no_part(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(OURS)
    check_no_part(tmp_path / name, "removing")


def test_of_half_a_manifest_everything_may_be_a_part(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(OURS[:20])
    with pytest.raises(CheckpointError, match="is a part of the checkpoint"):
        check_no_part(tmp_path / "merged", "removing")
