"""Two runs that save into one folder at the same time hear of each other; a run that died does not stop the next."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from acc_trainer.checkpoint import CheckpointError, owner, save_state
from acc_trainer.checkpoint.layout import lock_of
from acc_trainer.checkpoint.owner import Owner

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks of POSIX systems")


def test_a_second_owner_is_refused_by_name_until_the_first_lets_go(tmp_path):
    first = Owner(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=rf"process {os.getpid()} on {socket.gethostname()} \(this process"
    ):
        Owner(tmp_path / "c")
    Owner(tmp_path / "d").release()
    first.release()
    first.release()
    Owner(tmp_path / "c").release()
    assert os.listdir(tmp_path) == []


def test_all_automatic_names_of_a_folder_have_one_owner(tmp_path):
    first = Owner(tmp_path / "checkpoint_3")
    with pytest.raises(CheckpointError, match=r"another save is writing into .*checkpoint_4 now"):
        Owner(tmp_path / "checkpoint_4")
    first.release()


HOLD = """
import sys, time
from pathlib import Path
from acc_trainer.checkpoint.owner import Owner
owner = Owner(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_another_process_is_named_while_it_lives_and_forgotten_when_it_was_killed(runs, tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(
                CheckpointError, match=rf"process {other.pid} on .*give this one another folder"
            ):
                save_state(runs.build(), tmp_path / "c")
            assert not (tmp_path / "c").exists()
        finally:
            other.send_signal(signal.SIGKILL)
    save_state(runs.build(), tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_a_staging_folder_of_a_living_run_is_not_touched(runs, tmp_path):
    first = Owner(tmp_path / "checkpoint_0")
    (tmp_path / ".checkpoint_0.writing").mkdir()
    (tmp_path / ".checkpoint_0.writing" / "half").write_text("of the other run")
    for name in ("checkpoint_0", "checkpoint_1"):
        with pytest.raises(CheckpointError, match="another save is writing"):
            save_state(runs.build(), tmp_path / name)
    assert (tmp_path / ".checkpoint_0.writing" / "half").exists()
    first.release()


def test_where_there_are_no_locks_the_process_is_looked_for(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(owner.fcntl, "flock", no_locks)
    first = Owner(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        Owner(tmp_path / "c")
    first.release()
    path = lock_of(tmp_path / "c")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for said in (
        {"host": socket.gethostname(), "pid": ended.pid},
        {"host": "another machine", "pid": os.getpid()},
        {"host": socket.gethostname(), "pid": "x"},
        [],
    ):
        path.write_text(json.dumps(said))
        Owner(tmp_path / "c").release()
    path.write_text('{"host": "cut o')
    Owner(tmp_path / "c").release()


def test_a_folder_that_vanished_does_not_hide_why_the_save_failed(runs, tmp_path):
    one = Owner(tmp_path / "c")
    os.unlink(lock_of(tmp_path / "c"))
    one.release()


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no forks")
def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path):
    first = Owner(tmp_path / "c")
    done, over = os.pipe()
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:  # it lives longer than the parent's save
        os.close(over)
        os.write(begins, b".")
        os.read(done, 1)
        os._exit(0 if first._file is None else 1)
    try:
        os.read(begun, 1)
        first._file.close()  # what a kill leaves of the parent: no unlocking
        Owner(tmp_path / "c").release()
    finally:
        os.close(over)
        assert os.waitpid(child, 0)[1] == 0
