"""Names are the specification's, and an automatic name gives its number back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.checkpoint import layout


def _weights(name: str) -> list[str]:
    ends = ("safetensors", "bin", "safetensors.index.json", "bin.index.json")
    return [f"{name if 'safetensors' in end else f'pytorch_{name}'}.{end}" for end in ends]


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


@pytest.mark.parametrize(
    "name", ["checkpoint_07", "checkpoint_-1", "checkpoint_\u0663", "checkpoint_" + "9" * 30]
)
def test_names_and_numbers_are_one_to_one(name):
    assert layout.number_of(name) is None


def test_every_file_of_a_checkpoint_is_known_as_one_and_others_are_not():
    named = [*_weights("model"), *_weights("model_1"), layout.SCALER]
    named += [layout.scheduler_file(1), layout.loader_file(2), layout.custom_file(0), layout.random_file(3)]
    named += [layout.progress_file(0), layout.gradients_file(11), "optimizer.bin", "optimizer_1.bin"]
    named += ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin", "pytorch_model_fsdp_rank3.bin"]
    named += [
        "pytorch_model_fsdp_0/.metadata",
        "optimizer_0/__1_0.distcp",
        "model-00001-of-00002.safetensors",
    ]
    assert [name for name in named if not layout.OURS.fullmatch(name)] == []
    others = ["manifest.json", "notes.txt", "model_card.md", "logs/model.safetensors", "optimizer.bin.orig"]
    assert [name for name in others if layout.OURS.fullmatch(name)] == []


def test_helper_folders_lie_beside_the_target_and_are_hidden():
    target = Path("some", "run")
    for helper in (layout.staging_of, layout.parked_of, layout.removing_of):
        assert helper(target).parent == target.parent
        assert helper(target).name.startswith(".run.")
