"""The trackers of one Accelerator: a run from start to finish, and what a tracker's failure does to it."""

from __future__ import annotations

import pytest
import torch

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, BlankTracker, GeneralTracker


def test_a_run_reaches_the_tracker_in_order(noting):
    tracker = noting()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run", config={"lr": 1})
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"noting": {"extra": True}})
    assert accelerator.get_tracker("noting") is tracker
    assert accelerator.get_tracker("noting", unwrap=True) is tracker.calls
    assert accelerator.trackers == [tracker]
    accelerator.end_training()
    assert tracker.calls == ["start", ("config", {"lr": 1}), ({"loss": 0.5}, 3, {"extra": True}), "finish"]
    assert accelerator.trackers == []


def test_a_second_run_logs_to_its_own_trackers_only(noting):
    tracker = noting()
    accelerator = Accelerator(log_with=tracker)
    for run in ("one", "two"):
        tracker.calls.clear()
        accelerator.init_trackers(run)
        accelerator.log({"a": run})
        assert tracker.calls == ["start", ({"a": run}, None, {})]
        accelerator.end_training()


def test_values_that_go_nowhere_are_said_once(noting, caplog):
    accelerator = Accelerator(log_with=noting())
    for _ in range(2):
        accelerator.log({"a": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "log has no effect: no tracker of log_with is running; call init_trackers first (end_training ends them)"
    ]
    Accelerator().log({"a": 1})  # no tracker was asked for
    accelerator.init_trackers("one")
    accelerator.log({"a": 1})
    assert len(caplog.records) == 1


def test_starting_again_finishes_the_run_before(noting):
    tracker = noting()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("one")
    accelerator.init_trackers("two")
    accelerator.log({"a": 1})
    assert tracker.calls == ["start", "finish", "start", ({"a": 1}, None, {})]


def test_rank_0_alone_tracks_and_the_others_have_a_blank_one(noting):
    class Everywhere(noting):
        main_process_only = False

    def work():
        tracker = Everywhere()
        accelerator = Accelerator(log_with=tracker)
        accelerator.init_trackers("run", config={})
        accelerator.log({"a": 1})
        got = accelerator.get_tracker("noting")
        got.anything_at_all = 1
        with pytest.raises(ValueError, match="no tracker 'wandb': log_with has noting"):
            accelerator.get_tracker("wandb")
        accelerator.end_training()
        return type(got).__name__, len(tracker.calls)

    assert run_threads(2, work) == [("Everywhere", 4), ("BlankTracker", 0)]


def test_without_trackers_a_blank_one_stands_in():
    accelerator = Accelerator()
    accelerator.init_trackers("run")
    accelerator.log({"a": 1})
    blank = accelerator.get_tracker("anything")
    blank.log_images({"a": []})
    assert isinstance(blank, GeneralTracker)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda a: a.log(0.5), TypeError, "log takes a dict of values by name"),
        (
            lambda a: a.log({"a": 1}, step=1.5),
            TypeError,
            "step of log must be a whole number or None, got 1.5",
        ),
        (lambda a: a.log({"a": 1}, step="2"), TypeError, "got '2'"),
        (
            lambda a: a.log({"a": 1}, log_kwargs={"nothing": {}}),
            ValueError,
            "log_kwargs names 'nothing', which is no tracker",
        ),
        (lambda a: a.init_trackers("run", config=[1]), TypeError, "takes the settings as a dict"),
        (
            lambda a: a.init_trackers("run", init_kwargs={"wand": {}}),
            ValueError,
            "init_kwargs names 'wand', which is no tracker",
        ),
    ],
)
def test_wrong_use_is_an_error_on_every_rank(noting, call, error, told):
    def work():
        accelerator = Accelerator(log_with=noting())
        accelerator.init_trackers("run")
        with pytest.raises(error, match=told):
            call(accelerator)

    run_threads(2, work)


def test_a_step_may_be_anything_that_counts(noting):
    tracker = noting()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    accelerator.log({"a": 1}, step=torch.tensor(7))
    assert tracker.calls[-1][1] == 7


def test_settings_for_another_known_tracker_are_fine_and_for_a_given_one_without_effect(noting, caplog):
    accelerator = Accelerator(log_with=noting())
    accelerator.init_trackers("run", init_kwargs={"wandb": {"entity": "us"}})
    assert caplog.text == ""
    accelerator.init_trackers("run", init_kwargs={"noting": {"entity": "us"}})
    assert "init_kwargs['noting'] has no effect" in caplog.text


@pytest.fixture
def failing(noting):
    """A tracker whose methods in `fails` raise `error`."""

    class Failing(noting):
        name = "failing"
        error: BaseException = OSError("no network")
        fails = frozenset()

        def start(self):
            self.call("start")

        def log(self, values, step=None):
            self.call("log", values, step)

        def finish(self):
            self.call("finish")

        def call(self, method, *args):
            if method in self.fails:
                raise self.error
            getattr(super(), method)(*args)

    return Failing


def test_one_that_cannot_start_is_left_out_of_the_run(failing, noting, caplog):
    failing.fails = frozenset({"start"})
    fine = noting()
    accelerator = Accelerator(log_with=[failing(), fine])
    accelerator.init_trackers("run", config={})
    accelerator.log({"a": 1})
    assert accelerator.trackers == [fine]
    accelerator.get_tracker("failing").log_images({"a": 1})
    assert isinstance(accelerator.get_tracker("failing", unwrap=True), BlankTracker)
    assert "tracker 'failing' could not start and is left out of this run: OSError: no network" in caplog.text
    accelerator.end_training()
    assert fine.calls == ["start", ("config", {}), ({"a": 1}, None, {}), "finish"]


@pytest.mark.parametrize(
    "error", [TypeError("unexpected keyword"), ValueError("no such mode"), ImportError("not there")]
)
def test_wrong_arguments_at_the_start_raise_and_leave_nothing_open(failing, noting, error):
    failing.fails, failing.error = frozenset({"start"}), error
    fine = noting()
    accelerator = Accelerator(log_with=[fine, failing()])
    with pytest.raises(type(error), match=str(error)):
        accelerator.init_trackers("run")
    assert fine.calls == ["start", "finish"]
    assert accelerator.trackers == []


def test_values_that_do_not_arrive_are_counted_and_said_once(failing, noting, caplog):
    tracker, fine = failing(), noting()
    accelerator = Accelerator(log_with=[tracker, fine])
    accelerator.init_trackers("run")
    for step in range(6):
        tracker.fails = {"log"} if step in (1, 2, 4) else set()
        accelerator.log({"a": step}, step=step)
    tracker.fails = set()
    assert [call[1] for call in tracker.calls[1:]] == [0, 3, 5]
    assert [call[1] for call in fine.calls[1:]] == [0, 1, 2, 3, 4, 5]
    accelerator.end_training()
    assert caplog.text.count("the values of step 1 are lost; it is tried again: OSError: no network") == 1
    assert "tracker 'failing' did not get 3 of the calls of this run" in caplog.text
    assert len([one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]) == 2


def test_after_three_failures_in_a_row_it_is_left_out(failing, caplog):
    tracker = failing()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    tracker.fails = {"log"}
    for step in range(5):
        accelerator.log({"a": 1}, step=step)
    tracker.fails = set()
    accelerator.log({"a": 1}, step=5)
    assert accelerator.trackers == []
    accelerator.get_tracker("failing").log({"a": 1})
    accelerator.end_training()
    assert tracker.calls == ["start", "finish"]
    assert "failed 3 times in a row and is left out from here on" in caplog.text
    assert "did not get 6 of the calls" in caplog.text


def test_a_value_of_a_type_that_it_cannot_take_raises(failing):
    failing.error = TypeError("not serializable")
    tracker = failing()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    tracker.fails = {"log"}
    with pytest.raises(TypeError, match="not serializable"):
        accelerator.log({"a": 1})


def test_one_failing_finish_keeps_neither_the_others_open_nor_the_script_from_ending(failing, noting, caplog):
    failing.fails = frozenset({"finish"})
    fine = noting()
    accelerator = Accelerator(log_with=[failing(), fine])
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert fine.calls[-1] == "finish"
    assert "tracker 'failing' failed while it finished, its last values may be lost: OSError" in caplog.text


def test_an_interrupt_is_not_a_trackers_failure(failing):
    failing.error = KeyboardInterrupt()
    tracker = failing()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    tracker.fails = {"log"}
    with pytest.raises(KeyboardInterrupt):
        accelerator.log({"a": 1})
