"""What the constructor checks: the same errors on one rank and on several."""

from __future__ import annotations

import pytest

from acc_ops.enums import RNGType
from acc_ops.testing import run_threads
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.kwargs import AutocastKwargs
from acc_trainer import Accelerator, setup
from acc_trainer.state import AcceleratorState


@pytest.mark.parametrize("ranks", [1, 3])
def test_rng_types_are_checked_when_the_accelerator_is_built(ranks):
    def work():
        with pytest.raises(TypeError, match=r"a list of generators.*got 'torch'"):
            Accelerator(rng_types="torch")
        with pytest.raises(TypeError, match="got 5"):
            Accelerator(rng_types=5)
        with pytest.raises(ValueError, match=r"rng_types knows torch.*got 'foo'"):
            Accelerator(rng_types=["torch", "foo"])
        with pytest.raises(ValueError, match="'hpu', but this machine has no such device"):
            Accelerator(rng_types=[RNGType.HPU])
        return Accelerator(rng_types=["torch", RNGType.GENERATOR]).rng_types

    assert run_threads(ranks, work) == [["torch", RNGType.GENERATOR]] * ranks


def test_a_set_up_that_fails_leaves_the_next_accelerator_its_choice(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no strategy")

    with monkeypatch.context() as broken:
        broken.setattr(setup, "choose_strategy", refuse)
        with pytest.raises(ValueError, match="no strategy"):
            Accelerator(mixed_precision="bf16")
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


def test_accelerators_that_share_a_configuration_do_not_change_each_others():
    shared = DataLoaderConfiguration()
    first, second = Accelerator(dataloader_config=shared), Accelerator(dataloader_config=shared)
    first.even_batches = False
    assert (first.even_batches, second.even_batches, shared.even_batches) == (False, True, True)


def test_another_precision_in_one_run_says_how_to_end_the_run():
    accelerator = Accelerator(mixed_precision="no")
    with pytest.raises(ValueError, match=r"'no' already .* end_training\(\)"):
        Accelerator(mixed_precision="bf16")
    accelerator.end_training()
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


def test_a_variable_that_turns_an_unbuilt_engine_on_is_refused_instead_of_training_something_else(
    monkeypatch,
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        ValueError, match=r"ACCELERATE_USE_DEEPSPEED is set: DeepSpeed is not built yet, unset it"
    ):
        Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    AcceleratorState()  # the run that is under way


@pytest.mark.parametrize("name", ["deepspeed_plugin", "megatron_lm_plugin"])
def test_a_plugin_of_an_unbuilt_engine_is_refused_alike_by_both_doors(name):
    told = []
    for door in (Accelerator, AcceleratorState):
        with pytest.raises(ValueError, match=f"{name} was given .5.: .* is not built yet") as caught:
            door(**{name: 5})
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_a_handler_outside_a_list_is_refused_with_the_list_to_write():
    with pytest.raises(TypeError, match=r"takes a list.*kwargs_handlers=\[AutocastKwargs"):
        Accelerator(kwargs_handlers=AutocastKwargs())
