"""Bad values are answered before anything is forked (forking itself: integration-tests)."""

from __future__ import annotations

import pytest

from acc_trainer.launch.notebook import debug_launcher, notebook_launcher


def _never():
    raise AssertionError("the function must not be called")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": 1, "mixed_precision": "fp7"}, "one of no, fp16, bf16, got 'fp7'"),
        ({}, "needs num_processes"),
        ({"num_processes": 0}, "at least 1, got 0"),
        ({"num_processes": 2, "num_nodes": 2, "node_rank": 2}, "from 0 to 1"),
    ],
)
def test_bad_values_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        notebook_launcher(_never, **options)


def test_a_number_of_debug_processes_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        debug_launcher(_never, num_processes=0)
