"""Real tracking libraries, offline: two runs in one process, and what each library wrote, read back. Those not installed are skipped.

`hatch run test` has the light ones, `hatch run trackers:test` the others. Every library runs in a process and a home of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PRELUDE = """
import enum, json, os, pathlib, sys, time
import torch
from acc_trainer import Accelerator

class Colour(enum.Enum):
    RED = "red"

CONFIG = {
    "lr": 0.1, "optimizer": {"name": "adam", "betas": (0.9, 0.99)}, "colour": Colour.RED, "path": pathlib.Path("a/b"),
    "none": None, "weights": torch.tensor([1.0, 2.0]), "dtype": torch.float16, "flag": True, "nan": float("nan"),
}
PICTURE = torch.arange(48, dtype=torch.uint8).reshape(4, 4, 3).numpy()

def run(name, kwargs, more=lambda tracker: None):
    accelerator = Accelerator(log_with=name, project_dir=".")
    for project in ("first", "second"):
        accelerator.init_trackers(project, config=CONFIG, init_kwargs={name: dict(kwargs)})
        tracker = accelerator.get_tracker(name)
        assert tracker.name == name and tracker.tracker is not None
        for step in range(3):
            values = {"train_loss": torch.tensor(1.0 / (step + 1)), "count": step, "note": "hello", "both": {"a": 1.0, "b": 2.0}}
            accelerator.log(values, step=step)
        more(tracker)
        assert [(one.lost, one.closed) for one in accelerator._trackers._running] == [(0, False)]
        accelerator.end_training()

def files(pattern):
    return sorted(pathlib.Path(".").glob(pattern))
"""

SCRIPTS = {
    "wandb": """
def more(tracker):
    tracker.log_images({"picture": [PICTURE]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]], step=5)
run("wandb", {"mode": "offline"}, more)
made = files("wandb/offline-run-*")
assert len(made) == 2, made
for folder in made:
    (record,) = folder.glob("run-*.wandb")
    texts = (b"train_loss", b"optimizer", b"adam", b"colour", b"hello")
    until = time.monotonic() + 30  # the library's own process writes the file
    while any(text not in record.read_bytes() for text in texts) and time.monotonic() < until:
        time.sleep(0.1)
    assert [text for text in texts if text not in record.read_bytes()] == []
    assert list(folder.glob("files/media/images/picture_*.png")) and list(folder.glob("files/media/table/table_*.json"))
""",
    "trackio": """
import sqlite3
def more(tracker):
    tracker.log_images({"picture": [PICTURE]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]], step=5)
run("trackio", {"embed": False, "auto_log_cpu": False}, more)
for name in ("first", "second"):
    data = sqlite3.connect(f"trackio/{name}.db")
    rows = [(step, json.loads(text)) for step, text in data.execute("select step, metrics from metrics order by step")]
    assert [row["count"] for step, row in rows if "count" in row] == [0, 1, 2], rows
    assert rows[0][0] == 0 and rows[0][1]["train_loss"] == 1.0 and rows[0][1]["note"] == "hello"
    assert any("picture/0" in row for _, row in rows) and any("table" in row for _, row in rows), rows
    settings = json.loads(data.execute("select config from configs").fetchone()[0])
    assert settings["optimizer"] == {"name": "adam", "betas": [0.9, 0.99]} and settings["colour"] == "red", settings
""",
    "comet_ml": """
import zipfile
import comet_ml
def more(tracker):
    tracker.log_images({"picture": [PICTURE]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]], step=5)
where = comet_ml.ExperimentConfig(offline_directory="comet")
run("comet_ml", {"online": False, "experiment_config": where}, more)
made = files("comet/*.zip")
assert len(made) == 2, made
for path in made:
    archive = zipfile.ZipFile(path)
    lines = archive.read("messages.json").decode().splitlines()
    texts = "\\n".join(lines)
    for text in ("train_loss", "optimizer.name", "adam", "both/a", "hello", "picture", "table.csv"):
        assert text in texts, text
""",
    "swanlab": """
import yaml
def more(tracker):
    tracker.log_images({"picture": [PICTURE]}, step=4)
run("swanlab", {"mode": "offline"}, more)
made = files("swanlog/run-*")
assert len(made) == 2, made
for folder in made:
    settings = (folder / "files" / "config.yaml").read_text()
    assert "adam" in settings and "red" in settings, settings
    assert list(folder.glob("media/image/*.png")) and len(list(folder.glob("media/text/*.txt"))) == 3
    (record,) = folder.glob("run-*.swanlab")
    assert b"train_loss" in record.read_bytes()
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
def more(tracker):
    pathlib.Path("artifact.txt").write_text("kept")
    tracker.log_artifact("artifact.txt")
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]])
run("mlflow", {"run_name": "named"}, more)
client = mlflow.MlflowClient()
for name in ("first", "second"):
    experiment = client.get_experiment_by_name(name)
    (made,) = client.search_runs([experiment.experiment_id])
    assert made.info.status == "FINISHED" and made.info.run_name == "named"
    assert made.data.params["optimizer.betas"] == "[0.9, 0.99]" and made.data.params["colour"] == "red", made.data.params
    points = [(point.step, point.value) for point in client.get_metric_history(made.info.run_id, "count")]
    assert points == [(0, 0.0), (1, 1.0), (2, 2.0)], points
    assert made.data.metrics["both/a"] == 1.0
    assert {one.path for one in client.list_artifacts(made.info.run_id)} == {"artifact.txt", "table.json"}
""",
    "dvclive": """
import yaml
def more(tracker):
    tracker.log_images({"picture": PICTURE}, step=4)
    rows = pathlib.Path("live/plots/metrics/train_loss.tsv").read_text().splitlines()
    assert [row.split("\\t")[0] for row in rows] == ["step", "0", "1", "2"], rows
run("dvclive", {"dir": "live", "save_dvc_exp": False}, more)
metrics = json.loads(pathlib.Path("live/metrics.json").read_text())
assert metrics["note"] == "hello" and metrics["both"] == {"a": 1.0, "b": 2.0}, metrics
settings = yaml.safe_load(pathlib.Path("live/params.yaml").read_text())
assert settings["optimizer"] == {"name": "adam", "betas": [0.9, 0.99]} and settings["colour"] == "red", settings
assert files("live/plots/images/picture.png")
""",
    "clearml": """
import clearml
pathlib.Path("requirements.txt").write_text("torch\\n")  # or ClearML reads every source file to find what it needs
clearml.Task.force_requirements_env_freeze(True, "requirements.txt")
clearml.Task.set_offline(True)
def more(tracker):
    tracker.log_images({"picture": PICTURE}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]], step=5)
run("clearml", {"auto_resource_monitoring": False, "auto_connect_frameworks": False}, more)
made = files("cache/offline/*/metrics.jsonl")
assert len(made) == 2, made
for path in made:
    points = [one for line in path.read_text().splitlines() for one in json.loads(line)]
    shown = [(one["metric"], one["variant"], one["iter"], one["value"]) for one in points if one["type"] == "training_stats_scalar"]
    assert ("loss", "train", 1, 0.5) in shown and ("count", "train", 2, 2) in shown, shown
    assert "adam" in (path.parent / "task.json").read_text()
""",
    "aim": """
import aim
from PIL import Image
def more(tracker):
    tracker.log_images({"picture": (Image.new("RGB", (4, 4)), "a caption")}, step=4)
run("aim", {"system_tracking_interval": None}, more)
runs = [aim.Run(one, repo=".", system_tracking_interval=None) for one in aim.Repo(".").list_all_runs()]
made = {one.name: one for one in runs}
assert sorted(made) == ["first", "second"], made
for one in made.values():
    assert one["hparams"]["optimizer"] == {"name": "adam", "betas": [0.9, 0.99]} and one["hparams"]["colour"] == "red"
    series = {metric.name: metric for metric in one.metrics()}
    assert list(series["count"].values.values_list()) == [0, 1, 2] and "both/a" in series, series
""",
}


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_two_runs_in_one_process_arrive_in_the_real_library(name, tmp_path):
    pytest.importorskip("numpy")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: hatch run trackers:test has all of them")
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "CLEARML_CACHE_DIR": str(tmp_path / "cache"),
        "DVCLIVE_LOGLEVEL": "ERROR",
        "AIM_UI_TELEMETRY_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SCRIPTS[name]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "left out" not in done.stderr
