"""JSON lines: every call of `log` is one line of a file, for people without a tracking library."""

from __future__ import annotations

import json
import time
from typing import Any

from acc_trainer.tracking.run_files import FileTracker
from acc_trainer.tracking.tracker import on_main_process
from acc_trainer.tracking.values import finite, number_of, table_rows


class JsonLinesTracker(FileTracker):
    """Writes `logging_dir`/`run_name`.jsonl; a later run of that name RUN~2.jsonl, unless it `resume`s: then it goes on in the newest file.

    A line is `{"_time": seconds since 1970, "_step": 7, "loss": 0.5}` in the order logged; the settings are a line with the key `_config`.
    NaN and the infinities are the texts "NaN", "Infinity" and "-Infinity", since JSON has no such numbers; `float()` reads them.
    """

    name = "jsonl"
    suffix = ".jsonl"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as one line."""
        self._write({"_time": time.time(), "_config": values})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One line: numbers, texts, lists and dicts as they are, anything else as its text."""
        self.refuse(kwargs)
        shown = {key: number_of(value) for key, value in values.items()}
        self._write({"_time": time.time(), "_step": step, **shown})

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """A table, given as columns and rows or as a dataframe, in one line."""
        headers, rows = table_rows(columns, data, dataframe)
        self.log({table_name: {"columns": headers, "data": rows}}, step)

    def _write(self, record: dict[str, Any]) -> None:
        self.opened.append(json.dumps(finite(record), ensure_ascii=False, allow_nan=False))
