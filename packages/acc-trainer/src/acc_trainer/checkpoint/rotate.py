"""Automatic names: which number is next, and the deleting of old checkpoints once a new one is safe."""

from __future__ import annotations

from pathlib import Path

from acc_plugins.options.project import CheckpointPolicy

from .commit import remove
from .layout import NotWholeError, number_of
from .listing import look
from .manifest import is_whole
from .policy import to_remove


def next_number(folder: Path, at_least: int = 0) -> int:
    """The number after the highest one in `folder`: a folder whole or not, or anything else that has the name."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max([at_least, *(number + 1 for name in names if (number := number_of(name)) is not None)])


def prune(folder: Path, newest: Path, policy: CheckpointPolicy | None) -> list[Path]:
    """Delete what `to_remove` says, now that `newest` is safe; the folders deleted. Nothing goes when `newest` is not whole any more."""
    number = number_of(newest.name)
    if policy is None or number is None or not is_whole(newest):
        return []
    known = [
        info
        for info in look(folder)
        # left alone: what a save is writing, and what cannot be judged now
        if not info.path.name.startswith(".") and isinstance(info.problem, (NotWholeError, type(None)))
    ]
    gone = [info.path for info in to_remove(known, number, policy)]
    for path in gone:
        remove(path)
    return gone
