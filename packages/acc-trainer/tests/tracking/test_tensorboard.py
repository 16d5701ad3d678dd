"""The TensorBoard tracker writes what TensorBoard reads."""

from __future__ import annotations

import pytest
import torch

from acc_trainer import Accelerator
from acc_trainer.tracking.tensorboard import TensorBoardTracker

pytest.importorskip("tensorboard")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return read


def test_scalars_texts_groups_and_images_are_read_back(tmp_path):
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1, "name": "x", "layers": [1, 2]})
    accelerator.log({"loss": 0.5, "accuracy": torch.tensor(0.25)}, step=1)
    accelerator.log({"loss": 0.25, "note": "hello", "both": {"a": 1.0, "b": 2.0}}, step=2)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"picture": torch.zeros(1, 3, 2, 2)}, step=2)
    accelerator.end_training()
    read = events(tmp_path / "run")
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert read.Scalars("accuracy")[0].value == 0.25
    assert "picture" in read.Tags()["images"]
    assert any("note" in tag for tag in read.Tags()["tensors"])
    assert events(tmp_path / "run" / "both_a").Scalars("both")[0].value == 1.0
    settings = next((tmp_path / "run").glob("*/hparams.yml")).read_text()
    assert "lr: 0.1" in settings


def test_what_tensorboard_cannot_show_is_left_out_and_said(tmp_path, caplog):
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    tracker.log({"x": [1, 2], "loss": 1.0})
    tracker.finish()
    assert (
        "tracker 'tensorboard' leaves out 'x': it shows numbers, texts and dicts of numbers, got list"
        in caplog.text
    )
    assert tracker.tracker is tracker.writer
    assert [event.value for event in events(tmp_path / "run").Scalars("loss")] == [1.0]


def test_it_needs_a_folder():
    with pytest.raises(ValueError, match="give logging_dir"):
        Accelerator(log_with="tensorboard")


def test_names_that_are_no_text_are_shown_as_text(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    tracker.log({1: 2.0, "group": {3: 4.0}}, step=0)
    tracker.finish()
    assert events(tmp_path / "run").Scalars("1")[0].value == 2.0
    assert events(tmp_path / "run" / "group_3").Scalars("group")[0].value == 4.0


@pytest.mark.parametrize("name", ["..", "../../out", "/out"])
def test_a_run_stays_in_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match=f"run name {name!r} leads out of the folder"):
        TensorBoardTracker(name, tmp_path)
    assert TensorBoardTracker("a/../b", tmp_path).logging_dir.startswith(str(tmp_path))
