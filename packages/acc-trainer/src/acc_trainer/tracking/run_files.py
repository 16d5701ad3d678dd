"""Files that a run appends whole lines to, so that a run that is killed leaves every line but the one in flight.

[Note: which file a run writes] RUN.jsonl in the logging folder; when that is there already, RUN~2.jsonl, RUN~3.jsonl and so on, so that two
runs never mix. A run that resumes another goes on with the newest of these.
"""

from __future__ import annotations

import itertools
import os
import re
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from acc_trainer.tracking.tracker import GeneralTracker, on_main_process

# for what is no text (half of a surrogate pair, in a file name): JSON reads it back
TEXT_ERRORS = "backslashreplace"
_TAIL = 1 << 16  # bytes looked at in one piece when the last line end is searched


class LineFile:
    """A file open for appending lines, each with one write to the system."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """`new`: FileExistsError when it is there. Half a line at the end, from a machine that stopped, is cut off."""
        self.path = path
        self._file = FileIO(path, "x" if new else "a")
        if not new:
            self._cut_half_line()

    def append(self, line: str) -> None:
        """Add a line; when the disk is full (OSError), nothing of it stays."""
        data = line.encode(errors=TEXT_ERRORS) + b"\n"
        before = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()

    def _cut_half_line(self) -> None:
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                begin = max(0, end - _TAIL)
                file.seek(begin)
                at = file.read(end - begin).rfind(b"\n")
                if at >= 0:
                    end = begin + at + 1
                    break
                end = begin
        if end != self.path.stat().st_size:
            self._file.truncate(end)


class FileTracker(GeneralTracker):
    """Keeps a run in `logging_dir`/`run_name` + `suffix`; `resume` goes on in the newest file of that name (see the note)."""

    requires_logging_directory = True
    suffix: ClassVar[str]

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], *, resume: bool = False) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.fspath(logging_dir)
        self.resume = resume
        self._file: LineFile | None = None

    @property
    def tracker(self) -> Path | None:
        """The path of the file, None before `start`."""
        return None if self._file is None else self._file.path

    @on_main_process
    def start(self) -> None:
        """Open the file."""
        self._file = open_run_file(self.logging_dir, self.run_name, self.suffix, self.resume)

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @property
    def opened(self) -> LineFile:
        """The file. Raises `RuntimeError` before `start`."""
        if self._file is None:
            raise RuntimeError(f"the tracker {self.name!r} has not been started: call start() first")
        return self._file

    def refuse(self, kwargs: dict[str, Any]) -> None:
        """Raise `TypeError` for arguments of `log` that a file has no use for."""
        if kwargs:
            raise TypeError(f"the tracker {self.name!r} takes values and step alone, got {', '.join(kwargs)}")


def open_run_file(folder: str | os.PathLike[str], run_name: str, suffix: str, resume: bool) -> LineFile:
    """The file of a new run, or of the newest one of that name that it resumes; see the note. Raises what `path_inside` raises."""
    first = path_inside(folder, f"{run_name}{suffix}")
    first.parent.mkdir(parents=True, exist_ok=True)
    if resume and (known := _numbered(first)):
        return LineFile(known[max(known)])
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{_stem(first)}~{number}{suffix}")
        try:
            return LineFile(path, new=True)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def path_inside(folder: str | os.PathLike[str], name: str) -> Path:
    """`folder`/`name`, which may have folders of its own in it. Raises ValueError for a name that leads out of `folder`."""
    outer = os.path.abspath(folder)
    if os.path.relpath(os.path.join(outer, name), outer).split(os.sep)[0] == os.pardir:
        raise ValueError(
            f"the run name {name!r} leads out of the folder {os.fspath(folder)!r}: take a name without '..' that is no absolute path, and give "
            "another folder (project_dir) if that is meant"
        )
    return Path(folder, name)


def write_whole(path: Path, text: str) -> None:
    """Replace a file by `text` in one step."""
    staged = staging(path)
    staged.write_text(text, encoding="utf-8", errors=TEXT_ERRORS)
    os.replace(staged, path)


def staging(path: Path) -> Path:
    """Where the next content of `path` is written before it takes its place."""
    return path.with_name(f".{path.name}.writing")


def _numbered(first: Path) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(_stem(first))}(?:~(\d+))?{re.escape(first.suffix)}")
    found = ((pattern.fullmatch(path.name), path) for path in first.parent.iterdir())
    return {int(match[1] or 1): path for match, path in found if match}


def _stem(path: Path) -> str:
    return path.name.removesuffix(path.suffix)
