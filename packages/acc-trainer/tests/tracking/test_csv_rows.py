"""CSV: one table whatever is logged, also when it grows wider, is resumed, or its writing fails."""

from __future__ import annotations

import csv
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer import Accelerator, CsvTracker
from acc_trainer.tracking import csv_rows


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k != "_time"} for row in csv.DictReader(file)]


def test_a_run_is_one_table_with_its_settings_beside_it(tmp_path):
    accelerator = Accelerator(log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"optimizer": {"lr": 0.1}, "nan": float("nan")})
    accelerator.log({"loss": 0.5, "both": {"a": 1}}, step=1)
    accelerator.log({"loss": float("nan"), "note": 'a "quoted"\ntext, with a comma'}, step=2)
    accelerator.log({"list": [1, float("inf")], "loss": -float("inf")})
    path = accelerator.get_tracker("csv", unwrap=True)
    accelerator.end_training()
    assert json.loads((tmp_path / "run.config.json").read_text()) == {"optimizer": {"lr": 0.1}, "nan": "NaN"}
    first, second, third = rows(path)
    assert first == {"_step": "1", "loss": "0.5", "both/a": "1", "note": "", "list": ""}
    assert math.isnan(float(second["loss"]))
    assert second["note"] == 'a "quoted"\\ntext, with a comma'
    assert (third["_step"], third["loss"], third["list"]) == ("", "-inf", '[1, "Infinity"]')


names = st.sampled_from(["a", "b", "c,d", 'e"f', "g\nh", "i\0", "_step", "_time"])
cells = st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.lists(st.dictionaries(names, cells), max_size=8), st.integers(min_value=0, max_value=8))
def test_every_value_is_in_its_column_whenever_the_run_was_resumed(tmp_path_factory, logged, cut):
    folder = tmp_path_factory.mktemp("csv")
    for part, resume in ((logged[:cut], False), (logged[cut:], True)):
        tracker = CsvTracker("run", folder, resume=resume)
        tracker.start()
        for values in part:
            tracker.log(values)
        tracker.finish()
    with (folder / "run.csv").open(encoding="utf-8", newline="") as file:
        made = list(csv.DictReader(file))
    assert len(made) == len(logged)
    escapes = str.maketrans({"\r": "\\r", "\n": "\\n", "\0": "\\0"})
    for row, values in zip(made, logged, strict=True):
        shown = {key.translate(escapes): str(value).translate(escapes) for key, value in values.items()}
        assert {key: text for key, text in row.items() if key in shown} == shown
        assert all(text == "" for key, text in row.items() if key not in shown and key != "_time")


def test_a_new_column_rewrites_the_table_once_and_others_do_not(tmp_path, monkeypatch):
    replaced = []
    replace = os.replace
    monkeypatch.setattr(csv_rows.os, "replace", lambda *paths: (replaced.append(paths), replace(*paths)))
    tracker = CsvTracker("run", tmp_path)
    tracker.start()
    for step in range(20):
        tracker.log({"a": step, **({"b": 1} if step == 10 else {})}, step=step)
    assert len(replaced) == 2  # the header, and b
    assert [row["b"] for row in rows(tmp_path / "run.csv")].count("1") == 1


def test_a_table_that_could_not_grow_is_whole_and_goes_on(tmp_path, monkeypatch):
    tracker = CsvTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": 1})

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv_rows.os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            tracker.log({"b": 2})
    tracker.log({"a": 3})
    tracker.log({"b": 4})
    tracker.finish()
    assert [(row["a"], row["b"]) for row in rows(tmp_path / "run.csv")] == [("1", ""), ("3", ""), ("", "4")]


def test_what_a_killed_run_left_beside_the_table_goes_when_it_is_resumed(tmp_path):
    tracker = CsvTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": 1}, step=0)
    tracker.finish()
    left = tmp_path / ".run.csv.writing"
    left.write_text("_step,_ti")
    resumed = CsvTracker("run", tmp_path, resume=True)
    resumed.start()
    resumed.log({"a": 2, "b": 3}, step=1)
    resumed.finish()
    assert not left.exists()
    assert rows(tmp_path / "run.csv") == [
        {"_step": "0", "a": "1", "b": ""},
        {"_step": "1", "a": "2", "b": "3"},
    ]
