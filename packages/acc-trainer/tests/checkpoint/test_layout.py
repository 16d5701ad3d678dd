"""Names are the specification's, and an automatic name gives its number back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.checkpoint import layout


def test_the_first_of_a_kind_has_no_number():
    assert [layout.numbered("model", index) for index in range(3)] == ["model", "model_1", "model_2"]
    assert layout.scheduler_file(0) == "scheduler.bin"
    assert layout.scheduler_file(2) == "scheduler_2.bin"
    assert layout.loader_file(1) == "dl_state_dict_1.bin"
    assert layout.custom_file(0) == "custom_checkpoint_0.pkl"
    assert layout.random_file(3) == "random_states_3.pkl"


@given(st.integers(0, 10**9))
def test_an_automatic_name_gives_its_number_back(number):
    assert layout.number_of(layout.automatic_name(number)) == number


@pytest.mark.parametrize(
    "name", ["checkpoint_", "checkpoint_1x", "checkpoint_best", ".checkpoint_1.writing", "xcheckpoint_1"]
)
def test_other_names_have_no_number(name):
    assert layout.number_of(name) is None


def test_helper_folders_lie_beside_the_target_and_are_hidden():
    target = Path("some", "run")
    for helper in (layout.staging_of, layout.parked_of, layout.removing_of):
        assert helper(target).parent == target.parent
        assert helper(target).name.startswith(".run.")
