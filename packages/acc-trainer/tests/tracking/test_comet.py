"""What the Comet tracker calls."""

from __future__ import annotations

import torch

from acc_trainer import CometMLTracker


def started(stand_in):
    library = stand_in("comet_ml")
    tracker = CometMLTracker("project", online=False)
    tracker.start()
    return library, tracker


def test_a_run_reaches_comet_in_order(stand_in):
    library, tracker = started(stand_in)
    tracker.store_init_configuration({"optimizer": {"lr": 0.1}})
    tracker.log({"loss": torch.tensor(0.5), "note": "hello", "both": {"a": 1}}, step=3)
    tracker.finish()
    tracker.finish()
    assert library.calls("start") == [((), {"project_name": "project", "online": False})]
    assert library.calls("start().log_parameters") == [(({"optimizer.lr": 0.1},), {})]
    assert library.calls("start().set_step") == [((3,), {})]
    assert library.calls("start().log_metric") == [(("loss", 0.5), {"step": 3}), (("both/a", 1), {"step": 3})]
    assert library.calls("start().log_other") == [(("note", "hello"), {})]
    assert len(library.calls("start().end")) == 1


def test_images_and_tables_have_calls_of_their_own(stand_in):
    library, tracker = started(stand_in)
    tracker.log_images({"faces": ["a", "b"]}, step=1)
    tracker.log_table("scores", columns=["x"], data=[[1], [2]])
    assert library.calls("start().log_image") == [
        (("a",), {"name": "faces", "step": 1}),
        (("b",), {"name": "faces", "step": 1}),
    ]
    assert library.calls("start().log_table") == [
        (("scores.csv",), {"tabular_data": [[1], [2]], "headers": ["x"]})
    ]
