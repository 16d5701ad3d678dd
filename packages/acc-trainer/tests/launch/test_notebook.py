"""Bad values are answered before anything is forked (forking itself: integration-tests)."""

from __future__ import annotations

import os
import sys
import types

import pytest

from acc_trainer.accelerator import Accelerator
from acc_trainer.launch.notebook import debug_launcher, notebook_launcher


@pytest.fixture(autouse=True)
def no_bitsandbytes(monkeypatch):
    monkeypatch.delitem(
        sys.modules, "bitsandbytes", raising=False
    )  # other tests import it where it is installed


def _never():
    raise AssertionError("the function must not be called")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": 1, "mixed_precision": "fp7"}, "one of no, fp16, bf16, fp8, got 'fp7'"),
        ({}, "needs num_processes"),
        ({"num_processes": 0}, "at least 1, got 0"),
        ({"num_processes": 2, "num_nodes": 2, "node_rank": 2}, "from 0 to 1"),
    ],
)
def test_bad_values_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        notebook_launcher(_never, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": "2"}, "num_processes must be a whole number, got '2'"),
        ({"num_processes": 2.5}, "num_processes must be a whole number, got 2.5"),
        ({"num_processes": True}, "num_processes must be a whole number, got True"),
        ({"num_processes": 2, "node_rank": "0"}, "node_rank must be a whole number, got '0'"),
        ({"num_processes": 2, "args": 5}, r"args must be a tuple or list .*, as in \(5,\); got 5"),
        ({"num_processes": 2, "args": "ab"}, "args must be a tuple or list .*got 'ab'"),
    ],
)
def test_wrong_types_are_named_with_the_parameter(options, said):
    with pytest.raises(TypeError, match=said):
        notebook_launcher(_never, **options)
    if set(options) <= {"num_processes", "args"}:
        with pytest.raises(TypeError, match=said):
            debug_launcher(_never, **options)


@pytest.mark.parametrize("port", ["x", 99999, -1, 2.5, None, ""])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(ValueError, match=f"use_port must be a port from 0 .*, got {port!r}"):
        notebook_launcher(_never, num_processes=2, use_port=port)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"function must be a function .*got 5"):
        notebook_launcher(5, num_processes=1)


def test_a_number_of_debug_processes_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        debug_launcher(_never, num_processes=0)


def test_in_colab_one_process_is_the_default_and_is_called_in_place(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    called = []
    notebook_launcher(
        lambda x: called.append((x, os.environ["ACCELERATE_MIXED_PRECISION"])), (1,), mixed_precision="bf16"
    )
    assert called == [(1, "bf16")]


def test_an_accelerator_that_is_there_is_an_error_until_its_training_has_ended(monkeypatch):
    accelerator = Accelerator()
    for launch in (debug_launcher, notebook_launcher):
        with pytest.raises(ValueError, match="an Accelerator was built before"):
            launch(_never, num_processes=2)
    accelerator.end_training()
    forked = []
    monkeypatch.setattr("acc_trainer.launch.notebook._fork", lambda *given: forked.append(given[2]))
    debug_launcher(_never, num_processes=3)
    assert forked == [3]


def test_machines_do_not_each_choose_a_port_of_their_own():
    with pytest.raises(ValueError, match="use_port 0 cannot be used with num_nodes=2"):
        notebook_launcher(_never, num_processes=1, num_nodes=2, use_port=0)
