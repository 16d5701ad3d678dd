"""The steps by which a process changes files: seen, stopped with a kill, or failed, by the library of `file_steps.c`."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("file_steps.c")
KINDS = ("open", "write", "sync", "rename", "unlink", "mkdir", "rmdir", "truncate", "link")
FILLS = ("open", "write", "mkdir", "link")  # what a full disk refuses


class Step(NamedTuple):
    """One change of files: `flags` are those of open, rename and mkdir, or bytes; `error` is an errno, 0 for what went well."""

    number: int
    kind: str
    path: str
    other: str
    flags: int
    result: int
    error: int
    thread: int


def why_not() -> str | None:
    """Why steps cannot be seen here; None where they can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD with glibc: Linux only"
    return None if shutil.which("cc") else "needs a C compiler (cc)"


def build(folder: Path) -> Path:
    """Compile the library into `folder`."""
    library = folder / "file_steps.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def read(log: Path) -> list[Step]:
    """The steps that a process wrote down, in order."""
    found = []
    for line in log.read_text().splitlines():
        number, kind, path, other, *numbers = line.split("\t")
        found.append(Step(int(number), kind, path, other, *map(int, numbers)))
    return found


def relative(steps: Sequence[Step], folder: Path) -> list[tuple[str, str, str]]:
    """What the steps do, with paths as seen from `folder`: the same in two folders for the same run."""
    root = os.path.realpath(folder)
    return [
        (step.kind, *(path and os.path.relpath(path, root) for path in (step.path, step.other)))
        for step in steps
    ]


@contextmanager
def watching(
    folder: Path,
    log: Path | None = None,
    *,
    die_at: int = 0,
    fail_at: int = 0,
    error: int = 0,
    kinds: tuple[str, ...] = KINDS,
    always: bool = False,
    half: bool = False,
    no_exchange: bool = False,
) -> Iterator[None]:
    """In a process that was started with the library: count the steps below `folder`, from 1 on, and write them into `log`.

    The process dies before step `die_at`; step `fail_at` fails with `error` if it is one of `kinds`, and so do all later ones with
    `always`; with `half` the first write that fails takes half of its bytes first. `no_exchange` has no file system exchange two names.
    """
    library = ctypes.CDLL(None)
    descriptor = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    library.file_steps_begin(os.fsencode(os.path.realpath(folder)), descriptor)
    library.file_steps_no_exchange(int(no_exchange))
    library.file_steps_die_at(ctypes.c_long(die_at))
    mask = sum(1 << KINDS.index(kind) for kind in kinds)
    if fail_at:
        library.file_steps_fail_at(ctypes.c_long(fail_at), error, mask, int(always), int(half))
    try:
        yield
    finally:
        library.file_steps_end()
        if descriptor >= 0:
            os.close(descriptor)


def refused(kind: str, number: int) -> tuple[str, ...]:
    """The kinds of steps that a disk with error `number` refuses from then on, when a step of `kind` was the first: all of the kind
    itself, and for a full disk whatever needs room."""
    return FILLS if number in (errno.ENOSPC, errno.EDQUOT) else (kind,)
