"""The interface of a tracker, the decorator, and the blank one."""

from __future__ import annotations

import copy
import pickle

from acc_ops.testing import run_threads
from acc_trainer import BlankTracker, GeneralTracker, on_main_process


def test_the_decorator_keeps_other_ranks_out():
    class Mine:
        main_process_only = True

        @on_main_process
        def note(self):
            return "noted"

    class Ours(Mine):
        main_process_only = False

    assert run_threads(2, lambda: (Mine().note(), Ours().note())) == [("noted", "noted"), (None, "noted")]


def test_a_blank_tracker_takes_every_call():
    blank = BlankTracker("wandb")
    assert isinstance(blank, GeneralTracker)
    assert blank.log({"a": 1}) is None
    assert blank.log_images({"a": [1]}, step=2, anything=True) is None
    assert blank.tracker.config.__class__  # the library's run, which it stands for as well
    assert pickle.loads(pickle.dumps(blank)).name == copy.deepcopy(blank).name == "wandb"


def test_what_is_left_out_is_said_once_for_each_key(noting, caplog):
    tracker = noting()
    for _ in range(3):
        tracker.leave_out("a", "no numbers")
    tracker.leave_out("b", "no numbers")
    assert [record.getMessage() for record in caplog.records] == [
        "tracker 'noting' leaves out 'a': no numbers",
        "tracker 'noting' leaves out 'b': no numbers",
    ]


def test_a_tracker_that_does_not_call_its_base_can_leave_values_out(caplog):
    class Own(GeneralTracker):
        name = "own"

        def __init__(self):
            pass

    Own().leave_out("a", "no numbers")
    assert "tracker 'own' leaves out 'a'" in caplog.text
