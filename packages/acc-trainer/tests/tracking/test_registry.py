"""Trackers: the table, the choice, and a run through the Accelerator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acc_ops.enums import LoggerType
from acc_ops.testing import run_threads
from acc_trainer import Accelerator
from acc_trainer.tracking.registry import (
    _IS_INSTALLED,
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process


class Noting(GeneralTracker):
    """Keeps what it is told."""

    name = "noting"
    requires_logging_directory = False

    def __init__(self, run_name="", **kwargs):
        super().__init__()
        self.run_name, self.kwargs, self.calls = run_name, kwargs, []

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def table():
    """The table of trackers, put back afterwards."""
    before, installed = dict(LOGGER_TYPE_TO_CLASS), dict(_IS_INSTALLED)
    yield LOGGER_TYPE_TO_CLASS
    for kept, saved in ((LOGGER_TYPE_TO_CLASS, before), (_IS_INSTALLED, installed)):
        kept.clear()
        kept.update(saved)


def test_a_run_reaches_the_tracker_in_order():
    tracker = Noting()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run", config={"lr": 1})
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"noting": {"extra": True}})
    assert accelerator.get_tracker("noting") is tracker
    assert accelerator.get_tracker("noting", unwrap=True) is tracker.calls
    assert accelerator.trackers == [tracker]
    accelerator.end_training()
    assert tracker.calls == ["start", ("config", {"lr": 1}), ({"loss": 0.5}, 3, {"extra": True}), "finish"]
    assert accelerator.trackers == []


def test_a_second_run_logs_to_its_own_trackers_only():
    tracker = Noting()
    accelerator = Accelerator(log_with=tracker)
    for run in ("one", "two"):
        tracker.calls.clear()
        accelerator.init_trackers(run)
        accelerator.log({"a": run})
        assert tracker.calls == ["start", ({"a": run}, None, {})]
        accelerator.end_training()


def test_a_registered_class_is_built_by_name(table):
    register_tracker_class(Noting)
    accelerator = Accelerator(log_with=["noting"])
    accelerator.init_trackers("run", init_kwargs={"noting": {"team": "a"}})
    made = accelerator.get_tracker("noting")
    assert (made.run_name, made.kwargs) == ("run", {"team": "a"})


def test_only_rank_0_tracks_unless_the_tracker_says_otherwise(table):
    class Everywhere(Noting):
        name = "everywhere"
        main_process_only = False

    register_tracker_class(Noting)
    register_tracker_class(Everywhere)

    def work():
        accelerator = Accelerator(log_with=["noting", "everywhere"])
        accelerator.init_trackers("run")
        accelerator.log({"a": 1})
        return [tracker.name for tracker in accelerator.trackers]

    assert run_threads(2, work) == [["noting", "everywhere"], ["everywhere"]]


def test_unknown_names_are_refused_and_a_blank_one_stands_in():
    accelerator = Accelerator()
    accelerator.init_trackers("run")
    blank = accelerator.get_tracker("anything")
    blank.log({"a": 1})
    assert type(blank) is GeneralTracker
    accelerator = Accelerator(log_with=Noting())
    accelerator.init_trackers("run")
    with pytest.raises(ValueError, match="no tracker 'wandb': running are noting"):
        accelerator.get_tracker("wandb")
    with pytest.raises(ValueError, match="unknown tracker 'paper'"):
        filter_trackers("paper")
    with pytest.raises(ValueError, match="'wandb' is not built yet"):
        filter_trackers(["wandb"])


def test_one_failing_finish_does_not_keep_the_others_open():
    class Failing(Noting):
        name = "failing"

        def finish(self):
            raise OSError("network")

    failing, fine = Failing(), Noting()
    accelerator = Accelerator(log_with=[failing, fine])
    accelerator.init_trackers("run")
    with pytest.raises(OSError, match="network"):
        accelerator.end_training()
    assert fine.calls[-1] == "finish"


def test_the_choice_is_made_once_each_and_knows_what_is_installed(table):
    register_tracker_class(Noting)
    _IS_INSTALLED["noting"] = lambda: False
    own = Noting()
    assert filter_trackers([own, own, "noting"]) == [own]
    _IS_INSTALLED["noting"] = lambda: True
    assert filter_trackers(["noting", "noting"]) == ["noting"]
    assert "noting" in filter_trackers("all")
    assert filter_trackers(None) == []
    assert "noting" not in [str(one) for one in get_available_trackers()]


def test_a_tracker_that_writes_files_needs_a_folder(table):
    class Writing(Noting):
        name = "writing"
        requires_logging_directory = True

    register_tracker_class(Writing)
    with pytest.raises(ValueError, match="'writing' writes files: give logging_dir"):
        filter_trackers("writing")
    assert filter_trackers("writing", "logs") == ["writing"]
    assert "writing" not in filter_trackers(LoggerType.ALL)


def test_a_class_without_the_essentials_is_refused(table):
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match="name, tracker"):
        Nameless()
    with pytest.raises(ValueError, match="needs the class attribute name"):
        register_tracker_class(Nameless)
    with pytest.raises(ValueError, match="derive from GeneralTracker"):
        register_tracker_class(dict)


def test_taking_a_name_over_is_said(table, caplog):
    register_tracker_class(Noting)
    register_tracker_class(Noting)
    assert "tracker 'noting' was Noting" in caplog.text


def test_the_decorator_keeps_other_ranks_out():
    class Mine:
        main_process_only = True

        @on_main_process
        def note(self):
            return "noted"

    class Ours(Mine):
        main_process_only = False

    assert run_threads(2, lambda: (Mine().note(), Ours().note())) == [("noted", "noted"), (None, "noted")]


def test_the_table_is_filled_whoever_asks_first() -> None:
    code = "import acc_trainer; assert 'tensorboard' in acc_trainer.LOGGER_TYPE_TO_CLASS"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
