"""What lies in a folder of checkpoints: which are whole, which is the newest, and why the others are not. No tensor is read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from acc_ops.shown_bytes import convert_bytes

from .layout import (
    MANIFEST,
    CheckpointError,
    NotWholeError,
    Project,
    automatic_folder,
    number_of,
    parked_of,
    removing_of,
    staging_of,
)
from .manifest import Manifest, check_bytes, check_whole, read_manifest


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One folder as it was when somebody looked. What only the manifest tells is None where there is none that can be read."""

    path: Path
    manifest: Manifest | None
    problem: CheckpointError | None  # why it is not whole, or cannot be looked at

    @property
    def whole(self) -> bool:
        """Whether every file is there in its size (after `check`: with its bytes)."""
        return self.problem is None

    @property
    def number(self) -> int | None:
        """The number in an automatic name."""
        return number_of(_public_name(self.path))

    @property
    def step(self) -> int | None:
        """`accelerator.step` when it was saved."""
        return None if self.manifest is None else self.manifest.step

    @property
    def epoch(self) -> int | None:
        """The epoch of the first loader."""
        return None if self.manifest is None else self.manifest.epoch

    @property
    def iteration(self) -> int | None:
        """The number it was saved under, whatever the folder is called now."""
        return None if self.manifest is None else self.manifest.iteration

    @property
    def world_size(self) -> int | None:
        """How many processes saved it."""
        return None if self.manifest is None else self.manifest.world_size

    @property
    def metric(self) -> float | None:
        """What `save_state(metric=...)` was given."""
        return None if self.manifest is None else self.manifest.metric

    @property
    def age_s(self) -> float | None:
        """Seconds since it was saved."""
        return None if self.manifest is None else time.time() - self.manifest.saved_at

    @property
    def bytes(self) -> int:
        """The sizes of its files, added up; of a folder without a manifest, those of everything in it."""
        if self.manifest is not None:
            return sum(said["bytes"] for said in self.manifest.files.values())
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # it is being deleted, as a folder may be
                    total += os.lstat(Path(folder, name)).st_size
        return total

    def check(self) -> CheckpointInfo:
        """The same, after every byte was compared with its checksum."""
        if self.problem is not None or self.manifest is None:
            return self
        try:
            check_bytes(self.path, self.manifest)
        except CheckpointError as error:
            return replace(self, problem=error)
        return self

    def row(self) -> list[str]:
        """What a table shows of it."""
        state = "whole" if self.problem is None else _reason(self)
        values = (self.step, self.epoch, self.world_size)
        metric = "-" if self.metric is None else f"{self.metric:.6g}"
        shown = ["-" if value is None else str(value) for value in values]
        return [self.path.name, *shown, metric, _age(self.age_s), convert_bytes(self.bytes), state]


class Checkpoints(Sequence[CheckpointInfo]):
    """The checkpoints in one folder, oldest first; printed, it is a table. `mode` is what `best` means unless it is told: "min" or "max"."""

    def __init__(self, folder: Path, found: Sequence[CheckpointInfo], mode: str = "min") -> None:
        self.folder = folder
        self.mode = mode
        self._found = list(found)

    @overload
    def __getitem__(self, place: int) -> CheckpointInfo: ...
    @overload
    def __getitem__(self, place: slice) -> list[CheckpointInfo]: ...
    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[CheckpointInfo]:
        return iter(self._found)

    @property
    def newest(self) -> CheckpointInfo | None:
        """The whole one of the highest step; of those the one with the highest number, of those the one saved last. Names with a number go before others."""
        return next((one for one in reversed(self._found) if one.whole), None)

    def best(self, mode: str | None = None) -> CheckpointInfo | None:
        """The whole one with the smallest metric, or with `mode="max"` the largest; of equal ones the newest. None without a metric.

        Without `mode` that of the project's `CheckpointPolicy` counts where `accelerator.checkpoints()` looked, else "min".
        """
        ranked = by_metric([one for one in self if one.whole], self.mode if mode is None else mode)
        return ranked[0] if ranked else None

    def check(self) -> Checkpoints:
        """The same, after every byte of every one was compared with its checksum."""
        return Checkpoints(self.folder, [one.check() for one in self], self.mode)

    def __str__(self) -> str:
        if not self:
            return f"no checkpoints in {self.folder}"
        newest = self.newest
        heads = ["name", "step", "epoch", "processes", "metric", "age", "size", "state"]
        rows = [one.row() for one in self]
        for one, row in zip(self, rows, strict=True):
            row[-1] += ", the newest" if one is newest else ""
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        right = (False, True, True, True, True, True, True, False)
        lines = [
            "  ".join(
                text.rjust(width) if number else text.ljust(width)
                for text, width, number in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in (heads, *rows)
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{len(self)} checkpoints in {self.folder}, {sum(one.whole for one in self)} whole>"


def look(folder: str | os.PathLike[str], mode: str = "min") -> Checkpoints:
    """What lies directly in `folder`: everything with a number in its name or with a manifest, and what killed saves left.

    `mode` is what its `best` means. CheckpointError when the folder cannot be read; one that is missing is empty.
    """
    folder = Path(folder)
    try:
        paths = [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror or error}; what checkpoints are in it cannot be said"
        ) from error
    found = [info for path in paths if (info := look_at(path)) is not None]
    return Checkpoints(folder, sorted(found, key=_age_rank), mode)


def look_in_project(project: Project, folder: str | os.PathLike[str] | None) -> Checkpoints:
    """`look` into `folder`, or where the project's automatically named checkpoints lie; the best is what its policy means by it.

    ValueError when there is neither a folder nor automatic naming.
    """
    mode = "min" if project.keep is None else project.keep.mode
    if folder is not None:
        return look(folder, mode)
    if not project.automatic_checkpoint_naming:
        raise ValueError("checkpoints() needs a folder: only automatic_checkpoint_naming has one of its own")
    return look(automatic_folder(project), mode)


def look_at(path: Path) -> CheckpointInfo | None:
    """One folder; None when it has nothing to do with checkpoints."""
    public = path.with_name(_public_name(path))
    if path in (staging_of(public), removing_of(public)):
        what = "a save is writing it, or was killed" if path == staging_of(public) else "it is being deleted"
        return CheckpointInfo(path=path, manifest=None, problem=NotWholeError(f"{path} is not whole: {what}"))
    if path.name.startswith(".") and (path != parked_of(public) or public.exists()):
        return None
    try:
        return CheckpointInfo(path=path, manifest=check_whole(path), problem=None)
    except CheckpointError as error:
        if not os.path.lexists(path / MANIFEST) and number_of(public.name) is None:
            return None
        return CheckpointInfo(path=path, manifest=_readable(path), problem=error)


def newest_whole(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint directly inside `folder`, see `Checkpoints.newest`.

    Folders that are not whole, and everything else that lies there, do not count.
    """
    newest = look(folder).newest
    return None if newest is None else newest.path


def by_metric(found: Sequence[CheckpointInfo], mode: str) -> list[CheckpointInfo]:
    """Those that have a metric, the best first; of equal ones the later in `found`. ValueError for a mode other than min and max."""
    if mode not in ("min", "max"):
        raise ValueError(f"the best by a metric is that of mode 'min' or 'max', got {mode!r}")
    having = [(one.metric, place, one) for place, one in enumerate(found) if one.metric is not None]
    sign = 1 if mode == "min" else -1
    return [one for _, _, one in sorted(having, key=lambda entry: (sign * entry[0], -entry[1]))]


def _age_rank(info: CheckpointInfo) -> tuple[bool, bool, int, int, float]:
    """Old before new, and what cannot be loaded by its name before what can."""
    manifest, number = info.manifest, info.number
    numbered = number is not None
    if manifest is None:
        return (numbered, False, 0, number or 0, 0.0)
    return (numbered, True, manifest.step, number or 0, manifest.saved_at)


def _readable(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _public_name(path: Path) -> str:
    """The name a folder has, will have or had: `checkpoint_1` for `.checkpoint_1.writing`."""
    name = path.name
    for suffix in (".old", ".writing", ".removing"):
        if name.startswith(".") and name.endswith(suffix):
            return name[1:].removesuffix(suffix)
    return name


def _reason(info: CheckpointInfo) -> str:
    """The problem without the folder's name, which stands in the same row."""
    said = str(info.problem).splitlines()[0]
    for known in (f"the checkpoint {info.path} is not whole: ", f"{info.path} is not whole: "):
        if said.startswith(known):
            return f"not whole: {said.removeprefix(known)}"
    return said


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
