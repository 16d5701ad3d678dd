"""Who writes into a folder, and what killed writers left there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from acc_bigmodel import disk_offload, offload_state_dict
from acc_bigmodel.stores.locking import locked, replacing, sweep
from acc_ops.testing import run_threads
from acc_ops.world import current_world


@pytest.mark.skipif(sys.platform == "win32", reason="writers hold no lock there")
def test_what_a_killed_writer_left_is_deleted_and_what_is_written_now_stays(tmp_path: Path) -> None:
    left = tmp_path / ".123-dead.writing"
    left.write_bytes(b"half")
    (tmp_path / ".model.writing").mkdir()  # of a save
    with replacing(tmp_path / "w") as staged:
        Path(staged).write_text("whole")
        sweep(tmp_path)
        assert not left.exists()
        assert Path(staged).exists()
    assert (tmp_path / "w").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.writing", "w"]


@pytest.mark.skipif(sys.platform == "win32", reason="writers hold no lock there")
def test_offloading_sweeps_first(tmp_path: Path) -> None:
    for offload in (
        lambda: offload_state_dict(tmp_path, {"a": torch.ones(2)}),
        lambda: disk_offload(torch.nn.Linear(2, 2), tmp_path),
    ):
        (tmp_path / ".9-dead.writing").write_bytes(b"half")
        offload()
        assert not list(tmp_path.glob(".*"))


def test_one_at_a_time_has_the_lock(tmp_path: Path) -> None:
    inside: list[int] = []

    def enter() -> None:
        for _ in range(20):
            with locked(tmp_path, ".lock"):
                inside.append(current_world().rank)
                assert len(inside) == 1
                inside.pop()

    run_threads(3, enter)
    assert not list(tmp_path.iterdir())


def test_a_staged_file_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, asked = os.path.exists, []

    def gone_once(path: str) -> bool:
        asked.append(path)
        if len(asked) == 1:
            os.unlink(path)
        return exists(path)

    monkeypatch.setattr(os.path, "exists", gone_once)
    with replacing(tmp_path / "w") as staged:
        Path(staged).write_text("whole")
    assert len(asked) == 2
    assert (tmp_path / "w").read_text() == "whole"
