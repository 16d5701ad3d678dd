"""Who saves into a folder now: one run at a time holds a lock file beside it, which a run that dies lets go of.

The lock is the system's (`flock`), so it is gone with its process, however that ends. Where a file system has no such locks, the owner's
process is looked for by its number, on the same machine only. A child that is forked while a save lasts lets go of the file at once: it would keep
the lock of a run that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakSet

from .layout import CheckpointError, lock_of

if sys.platform != "win32":
    import fcntl

_OWNERS: WeakSet[Owner] = WeakSet()  # for the children of this process


class Owner:
    """This process saves into `target`, from `Owner(target)` until `release()`.

    CheckpointError, naming the machine and the process, when another one, or another Accelerator of this process, does so now.
    """

    def __init__(self, target: Path) -> None:
        self._path = lock_of(target)
        self._file: FileIO | None = None
        _OWNERS.add(self)
        while not self._take(target):
            pass

    def release(self) -> None:
        """Let the next one in."""
        file = self._file
        if file is None:
            return
        self._file = None
        # a file that stays behind without its lock stops nobody
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # before the lock goes: afterwards it may be another one's
        with contextlib.suppress(OSError):
            _unlock(file)  # a forked worker may hold the same open file
        file.close()

    def leave_to_parent(self) -> None:
        """In a forked child: only the parent has the lock, which would else last as long as any of them lives."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _take(self, target: Path) -> bool:
        """Lock the file and sign it; False when the one before took it away meanwhile."""
        # unbuffered, since a child closes it at whatever moment it was forked; it is held as long as the save takes
        file = self._file = FileIO(self._path, "a+")
        try:
            held = _lock(file)
            other = _read(file)
            if held is False or (held is None and _is_at_work(other)):
                raise CheckpointError(
                    f"another save is writing into {target} now: {_described(other)}. Two runs must not save into one folder: give this "
                    "one another folder (or project_dir), or end the other one"
                )
            if _is_named(self._path, file):
                _sign(file)
                return True
        except BaseException:
            self._file = None
            file.close()
            raise
        self._file = None
        file.close()
        return False


def _leave_to_parent() -> None:
    for owner in list(_OWNERS):
        owner.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(file: FileIO) -> bool | None:
    """Whether the lock is ours now; None where the file system has none."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(file: FileIO) -> None:
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_named(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read(file: FileIO) -> dict[str, Any]:
    file.seek(0)
    try:
        said = json.loads(file.read() or b"{}")
    except ValueError:  # its writer died in the middle
        return {}
    return said if isinstance(said, dict) else {}


def _sign(file: FileIO) -> None:
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())


def _is_at_work(other: dict[str, Any]) -> bool:
    """Whether the process that signed lives, as far as this machine can tell. Of another machine's nothing is known: it does not count."""
    pid = other.get("pid")
    if other.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    if sys.platform == "win32":
        return False  # os.kill would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _described(other: dict[str, Any]) -> str:
    if "pid" not in other:
        return "its process is not known"
    here = (
        " (this process: another Accelerator, or another thread)" if other.get("pid") == os.getpid() else ""
    )
    return f"process {other['pid']} on {other.get('host')}{here}"
