"""JSON lines: what a file of a run holds, and what a kill leaves."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import pytest
import torch

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, JsonLinesTracker


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_is_read_back_line_by_line(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1, "layers": (1, 2)})
    accelerator.log({"loss": torch.tensor(0.5), "both": {"a": 1}, "note": "süß\n"}, step=4)
    accelerator.log({"loss": float("nan"), "list": [1.0, float("inf")]}, step=2)
    accelerator.get_tracker("jsonl").log_table("table", columns=["x"], data=[[1], [2]])
    path = accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.end_training()
    assert path == tmp_path / "run.jsonl"
    settings, *rows = records(path)
    assert settings["_config"] == {"lr": 0.1, "layers": [1, 2]}
    assert [row.pop("_time") > 0 for row in rows] == [True] * 3
    assert rows == [
        {"_step": 4, "loss": 0.5, "both": {"a": 1}, "note": "süß\n"},
        {"_step": 2, "loss": "NaN", "list": [1.0, "Infinity"]},
        {"_step": None, "table": {"columns": ["x"], "data": [[1], [2]]}},
    ]
    assert math.isnan(float(rows[1]["loss"]))


def test_a_resumed_run_continues_and_a_new_one_does_not(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    for kwargs in ({}, {"resume": True}, {}):
        accelerator.init_trackers("run", init_kwargs={"jsonl": kwargs})
        accelerator.log({"a": 1})
    accelerator.end_training()
    assert len(records(tmp_path / "run.jsonl")) == 2
    assert len(records(tmp_path / "run~2.jsonl")) == 1


def test_half_a_surrogate_pair_is_read_back(tmp_path):
    accelerator = Accelerator(log_with=["jsonl", "csv"], project_dir=tmp_path)
    accelerator.init_trackers("run", config={"path": "odd\udc80"})
    accelerator.log({"path": "odd\udc80"})
    accelerator.end_training()
    assert [row.get("path", row.get("_config")) for row in records(tmp_path / "run.jsonl")] == [
        {"path": "odd\udc80"},
        "odd\udc80",
    ]
    assert "odd\\udc80" in (tmp_path / "run.csv").read_text()


def test_rank_0_alone_writes(tmp_path):
    def work():
        accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
        accelerator.init_trackers("run")
        accelerator.log({"rank": accelerator.process_index})
        accelerator.end_training()

    run_threads(3, work)
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert [row["rank"] for row in records(tmp_path / "run.jsonl")] == [0]


def test_arguments_that_a_file_has_no_use_for_are_refused(tmp_path):
    accelerator = Accelerator(log_with=["jsonl", "csv"], project_dir=tmp_path)
    accelerator.init_trackers("run")
    for name in ("jsonl", "csv"):
        with pytest.raises(TypeError, match=f"{name}' takes values and step alone, got commit"):
            accelerator.log({"a": 1}, log_kwargs={name: {"commit": True}})


def test_it_says_when_it_was_not_started(tmp_path):
    tracker = JsonLinesTracker("run", tmp_path)
    assert tracker.tracker is None
    with pytest.raises(RuntimeError, match="call start"):
        tracker.log({"a": 1})


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_killed_run_leaves_whole_lines(kind, tmp_path):
    code = (
        "import sys\n"
        "from acc_trainer import JsonLinesTracker, CsvTracker\n"
        "kind = {'jsonl': JsonLinesTracker, 'csv': CsvTracker}[sys.argv[1]]\n"
        "tracker = kind('run', sys.argv[2])\n"
        "tracker.start()\n"
        "step = 0\n"
        "while True:\n"
        "    tracker.log({'a': step, f'new_{step // 50 % 20}': 'x' * 500}, step=step)\n"
        "    step += 1\n"
        "    if step == 200: print('running', flush=True)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code, kind, str(tmp_path)], stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"running\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    path = tmp_path / f"run.{kind}"
    lines = path.read_text().splitlines(keepends=True)
    if not lines[-1].endswith("\n"):  # the line in flight
        lines.pop()
    if kind == "jsonl":
        steps = [json.loads(line)["_step"] for line in lines]
    else:
        steps = [int(line.split(",")[0]) for line in lines[1:]]
        assert len({line.count(",") for line in lines}) == 1
    assert steps == list(range(len(steps)))
    assert len(steps) >= 200
