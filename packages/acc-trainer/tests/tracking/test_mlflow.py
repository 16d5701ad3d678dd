"""What the MLflow tracker calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from acc_trainer import MLflowTracker

RUN = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
CLIENT = "MlflowClient()"


@pytest.fixture
def library(stand_in):
    """MLflow with the run r1, without an experiment."""
    stand_in("mlflow.entities")
    entities = __import__("sys").modules["mlflow.entities"]
    entities.Param = lambda key, value: (key, value)
    entities.Metric = lambda key, value, time_ms, step: (key, value, step)
    stand_in("mlflow.utils.validation", MAX_PARAM_VAL_LENGTH=20, MAX_PARAMS_TAGS_PER_BATCH=2)
    made = stand_in(
        "mlflow",
        **{
            f"{CLIENT}.get_experiment_by_name()": None,
            f"{CLIENT}.create_experiment()": 7,
            "start_run()": RUN,
            "active_run()": RUN,
        },
    )
    return made


def test_a_run_reaches_mlflow_in_order(library, caplog):
    tracker = MLflowTracker("experiment", "artifacts", run_name="named", tags={"a": 1}, description="why")
    tracker.start()
    tracker.log({"loss": torch.tensor(0.5), "both": {"a": 1}, "note": "hello"}, step=3)
    tracker.finish()
    assert library.calls(f"{CLIENT}.create_experiment") == [
        (("experiment",), {"artifact_location": "artifacts"})
    ]
    assert library.calls("start_run") == [
        (
            (),
            {
                "run_id": None,
                "experiment_id": "7",
                "run_name": "named",
                "nested": False,
                "tags": {"a": 1},
                "description": "why",
            },
        )
    ]
    metrics = [("loss", 0.5, 3), ("both/a", 1.0, 3)]
    assert library.calls(f"{CLIENT}.log_batch") == [(("r1",), {"metrics": metrics})]
    assert "leaves out 'note'" in caplog.text
    assert len(library.calls("end_run")) == 1


def test_settings_go_in_batches_and_overlong_ones_are_said(library, caplog):
    tracker = MLflowTracker("experiment")
    tracker.start()
    tracker.store_init_configuration({"a": 1, "b": {"c": 2, "d": 3}, "long": "x" * 21})
    batches = [kwargs["params"] for _, kwargs in library.calls(f"{CLIENT}.log_batch")]
    assert batches == [[("a", "1"), ("b.c", "2")], [("b.d", "3")]]
    assert "leaves out 'long': its 21 characters are more than MLflow's 20" in caplog.text


def test_the_environment_wins_over_the_arguments(library, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "outside")
    monkeypatch.setenv("MLFLOW_RUN_ID", "r9")
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "blue"}')
    MLflowTracker("experiment", run_id="r0", tags={"team": "red"}).start()
    assert library.calls(f"{CLIENT}.get_experiment_by_name") == [(("outside",), {})]
    begun = library.calls("start_run")[0][1]
    assert (begun["run_id"], begun["nested"], begun["tags"]) == ("r9", True, {"team": "blue"})


@pytest.mark.parametrize("tags", ["{", "[1]"])
def test_tags_that_are_no_json_object_are_refused(tags):
    with pytest.raises(ValueError, match="tags must be a JSON object"):
        MLflowTracker("experiment", tags=tags)


def test_a_run_that_another_thread_began_is_ended_by_its_name(library):
    tracker = MLflowTracker("experiment")
    tracker.start()
    library.answers["active_run()"] = None
    tracker.finish()
    assert library.calls("end_run") == []
    assert library.calls(f"{CLIENT}.set_terminated") == [(("r1",), {})]


def test_files_figures_and_tables_become_artifacts(library):
    tracker = MLflowTracker("experiment")
    tracker.start()
    tracker.log_artifact("a.txt", "folder")
    tracker.log_artifacts("all")
    tracker.log_figure("figure", "plot.png", dpi=10)
    tracker.log_table("scores", columns=["x", "y"], data=[[1, 2], [3, 4]])
    assert library.calls(f"{CLIENT}.log_artifact") == [(("r1", "a.txt", "folder"), {})]
    assert library.calls(f"{CLIENT}.log_artifacts") == [(("r1", "all", None), {})]
    assert library.calls(f"{CLIENT}.log_figure") == [
        (("r1", "figure", "plot.png"), {"save_kwargs": {"dpi": 10}})
    ]
    assert library.calls(f"{CLIENT}.log_table") == [(("r1", {"x": [1, 3], "y": [2, 4]}, "scores.json"), {})]
