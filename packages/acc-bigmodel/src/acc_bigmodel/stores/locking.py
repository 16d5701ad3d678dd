"""Who writes into a folder now: one lock for it, staged files that their writers hold, and what killed writers left there.

[Note: a staged file]
A file is written under a name of its own, `.<process>-<random>.writing`, and renamed when it is whole. Its writer holds a lock
on it meanwhile, which the system lets go of when the writer dies, however it dies. So whoever gets that lock may delete it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

_STAGED = ".writing"


@contextlib.contextmanager
def replacing(file: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to, nobody else's, which becomes `file` at the end; on an exception it goes, and `file` stays."""
    staged, holder = _stage(os.path.dirname(file))
    try:
        yield staged
        os.replace(staged, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise
    finally:
        holder.close()  # which releases the lock


def sweep(folder: str | os.PathLike[str]) -> None:
    """Delete the staged files of writers that died; those of writers at work stay."""
    if sys.platform == "win32":
        return  # its writers hold no lock
    for path in Path(folder).glob(f".*{_STAGED}"):
        if path.is_dir():
            continue
        try:
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # renamed, or swept by another
        except OSError:  # somebody writes it, or this folder knows no locks
            continue
        logger.info("%s was left by a process that was killed, and is deleted", path)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], name: str) -> Iterator[None]:
    """One at a time among threads and processes, by the lock file `name`; a killed one holds nothing."""
    path = os.path.join(folder, name)
    while True:
        with open(path, "a+b") as file:  # closing it releases the lock
            _lock(file)
            if not _is_file(path, file):
                continue  # the one before took it away
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows keeps an open file
                    os.unlink(path)
            return


def _stage(folder: str) -> tuple[str, BinaryIO]:
    """The name of a new file, and the file that has its lock where there are locks."""
    while True:
        staged = os.path.join(folder, f".{os.getpid()}-{secrets.token_hex(8)}{_STAGED}")
        holder = open(staged, "xb")  # noqa: SIM115 - it is held as long as the file is written
        if sys.platform == "win32":
            holder.close()  # it does not rename open files
            return staged, holder
        with contextlib.suppress(OSError):
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(staged):
            return staged, holder
        holder.close()  # it was swept before it had its lock


def _lock(file: BinaryIO) -> None:
    if sys.platform == "win32":
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for somebody else who writes into %s", os.path.dirname(file.name))
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): do not let others offload into that folder now", file.name, error
        )


def _is_file(path: str, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
