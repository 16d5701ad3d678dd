"""What the DVCLive tracker calls."""

from __future__ import annotations

from acc_trainer import DVCLiveTracker


def test_a_run_reaches_dvclive_in_order(stand_in, caplog):
    library = stand_in("dvclive")
    tracker = DVCLiveTracker("run", dir="live")
    tracker.start()
    tracker.store_init_configuration({"layers": (1, 2)})
    tracker.log({"loss": 0.5, "both": {"a": 1}, "list": [1]}, step=3)
    tracker.log_images({"face": "pixels"})
    tracker.log_artifact("model.bin", type="model")
    live = tracker.tracker
    tracker.finish()
    assert library.calls("Live") == [((), {"dir": "live"})]
    assert library.calls("Live().log_params") == [(({"layers": [1, 2]},), {})]
    assert library.calls("Live().log_metric") == [(("loss", 0.5), {}), (("both/a", 1), {})]
    assert live.step == 3
    assert len(library.calls("Live().next_step")) == 1
    assert library.calls("Live().log_image") == [(("face.png", "pixels"), {})]
    assert library.calls("Live().log_artifact") == [(("model.bin",), {"type": "model"})]
    assert len(library.calls("Live().end")) == 1
    assert "leaves out 'list'" in caplog.text


def test_a_live_that_was_given_is_used(stand_in):
    library = stand_in("dvclive")
    given = stand_in("unused").live
    tracker = DVCLiveTracker(live=given)
    tracker.start()
    assert tracker.tracker is given
    assert library.calls("Live") == []
