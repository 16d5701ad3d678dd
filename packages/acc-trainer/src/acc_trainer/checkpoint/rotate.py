"""Automatic names: which number is next, and which old checkpoints go when there are more than `total_limit`."""

from __future__ import annotations

from pathlib import Path

from .commit import remove
from .layout import number_of
from .manifest import is_whole


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the automatically named folders, in order."""
    return [number for number, path in _numbered(folder) if path.is_dir()]


def next_number(folder: Path, at_least: int = 0) -> int:
    """The number after the newest one's: a folder whole or not, or anything else that has the name."""
    return max([at_least, *(number + 1 for number, _ in _numbered(folder))])


def to_remove(numbers: list[int], whole: set[int], newest: int, total_limit: int | None) -> list[int]:
    """Which older numbers go so that at most `total_limit` folders stay, `newest` among them.

    Whole ones stay before those that are not, new ones before old ones. Nothing goes when `total_limit` is None.
    """
    if total_limit is None:
        return []
    older = [number for number in numbers if number < newest]
    by_worth = sorted(older, key=lambda number: (number in whole, number), reverse=True)
    return sorted(by_worth[max(0, total_limit - 1) :])


def prune(folder: Path, newest: Path, total_limit: int | None) -> list[Path]:
    """Delete what `to_remove` says, now that `newest` is safe; the folders deleted."""
    number = number_of(newest.name)
    if total_limit is None or number is None:
        return []
    numbers = numbers_in(folder)
    whole = {n for n in numbers if is_whole(folder / f"checkpoint_{n}")}
    gone = [folder / f"checkpoint_{n}" for n in to_remove(numbers, whole, number, total_limit)]
    for path in gone:
        remove(path)
    return gone


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = [(number_of(path.name), path) for path in folder.iterdir()]
    return sorted((number, path) for number, path in found if number is not None)
