"""CSV: every call of `log` is one row of a table that spreadsheets and plotting programs read."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acc_trainer.tracking.run_files import TEXT_ERRORS, FileTracker, LineFile, staging, write_whole
from acc_trainer.tracking.tracker import on_main_process
from acc_trainer.tracking.values import finite, plain, spread

_FIRST = ["_step", "_time"]  # the columns that every row has
_ESCAPED = str.maketrans({"\r": "\\r", "\n": "\\n", "\0": "\\0"})


class CsvTracker(FileTracker):
    """Writes `logging_dir`/`run_name`.csv, and the settings to RUN.config.json; a later run of that name RUN~2.csv, unless it `resume`s.

    A row is a line: its step, the time in seconds since 1970, and a column for each name ever logged, nested dicts as `group/name`. A name
    that is new widens the table: it is written anew beside the old one and takes its place in one step. Cells of names that a row has not
    got are empty; NaN and the infinities are `nan`, `inf` and `-inf`.
    """

    name = "csv"
    suffix = ".csv"
    _columns: Sequence[str] = ()  # none before `start`

    @on_main_process
    def start(self) -> None:
        """Open the file, and read which columns it has."""
        super().start()
        path = self.opened.path
        staging(path).unlink(missing_ok=True)  # of a run that was killed while it widened the table
        self._columns = _header_of(path)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as JSON in a file beside the table."""
        text = json.dumps(finite(values), indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(self.opened.path.with_suffix(".config.json"), f"{text}\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row: numbers and texts as they are, anything else as its text."""
        self.refuse(kwargs)
        shown = {_cell(key): _cell(value) for key, value in spread(values).items()}
        row = {"_step": step, "_time": time.time(), **shown}
        new = [name for name in (*_FIRST, *row) if name not in self._columns]
        if new:
            self._widen([*self._columns, *dict.fromkeys(new)])
        self.opened.append(_line(row.get(name) for name in self._columns))

    def _widen(self, columns: list[str]) -> None:
        """The same rows under more columns."""
        path = self.opened.path
        staged = staging(path)
        added = "," * (len(columns) - len(self._columns))
        with (
            path.open(encoding="utf-8", newline="") as rows,
            staged.open("w", encoding="utf-8", errors=TEXT_ERRORS, newline="") as file,
        ):
            file.write(f"{_line(columns)}\n")
            next(rows, None)  # the old header
            file.writelines(f"{row[:-1]}{added}\n" for row in rows)
        self.opened.close()
        try:
            os.replace(staged, path)
            self._columns = columns
        finally:
            self._file = LineFile(path)


def _header_of(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _cell(value: Any) -> Any:
    """A number as it is, anything else as text, lists as JSON; line ends in it are escaped, so that a row stays a line."""
    shown = plain(value)
    if isinstance(shown, list):
        return json.dumps(finite(shown), ensure_ascii=False)
    return shown.translate(_ESCAPED) if isinstance(shown, str) else shown


def _line(cells: Iterable[Any]) -> str:
    """One line of the table, without its end."""
    made = io.StringIO()
    csv.writer(made, lineterminator="").writerow(cells)
    return made.getvalue()
