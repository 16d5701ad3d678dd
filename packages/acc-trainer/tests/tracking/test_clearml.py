"""What the ClearML tracker calls."""

from __future__ import annotations

import pytest

from acc_trainer import ClearMLTracker


def started(stand_in, **answers):
    library = stand_in("clearml", **{"Task.current_task()": None, **answers})
    tracker = ClearMLTracker("project", output_uri="there")
    tracker.start()
    return library, tracker


def test_a_run_reaches_clearml_in_order(stand_in, caplog):
    library, tracker = started(stand_in)
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"train_loss": 0.5, "eval_loss": 0.7, "speed": 2, "note": "hello"}, step=3)
    tracker.log({"best": 0.4})
    tracker.finish()
    names = {"project_name": "project", "task_name": "project", "output_uri": "there"}
    assert library.calls("Task.init") == [((), names)]
    assert library.calls("Task.init().connect_configuration") == [(({"lr": 0.1},), {})]
    report = "Task.init().get_logger()"
    shown = [(k["title"], k["series"], k["value"]) for _, k in library.calls(f"{report}.report_scalar")]
    assert shown == [("loss", "train", 0.5), ("loss", "eval", 0.7), ("speed", "train", 2)]
    assert library.calls(f"{report}.report_single_value") == [((), {"name": "best", "value": 0.4})]
    assert "leaves out 'note'" in caplog.text
    assert len(library.calls("Task.init().close")) == 1


def test_a_task_that_was_running_is_used_and_left_open(stand_in):
    library = stand_in("clearml")
    tracker = ClearMLTracker("project")
    tracker.start()
    tracker.log({"loss": 1}, step=0)
    tracker.finish()
    assert library.calls("Task.init") == []
    assert library.calls("Task.current_task().close") == []
    assert len(library.calls("Task.current_task().get_logger().report_scalar")) == 1


def test_the_environment_names_project_and_task(stand_in, monkeypatch):
    monkeypatch.setenv("CLEARML_PROJECT", "from outside")
    monkeypatch.setenv("CLEARML_TASK", "a task")
    library, _ = started(stand_in)
    assert library.calls("Task.init")[0][1]["project_name"] == "from outside"
    assert library.calls("Task.init")[0][1]["task_name"] == "a task"


def test_images_and_tables_have_calls_of_their_own(stand_in):
    library, tracker = started(stand_in)
    tracker.log_images({"eval_face": "pixels"}, step=1)
    tracker.log_table("scores", columns=["x"], data=[[1]], step=1)
    report = "Task.init().get_logger()"
    assert library.calls(f"{report}.report_image")[0][1] == {
        "title": "face",
        "series": "eval",
        "iteration": 1,
        "image": "pixels",
    }
    assert library.calls(f"{report}.report_table")[0][1]["table_plot"] == [["x"], [1]]
    with pytest.raises(ValueError, match="needs the rows"):
        tracker.log_table("scores")
