"""The public states: shared, resettable, with the specification's errors."""

from __future__ import annotations

import pytest
import torch

from acc_ops.enums import DistributedType
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins import deepspeed_required
from acc_trainer import Accelerator
from acc_trainer.state import (
    AcceleratorState,
    PartialState,
    is_initialized,
    precision_name,
)


def test_all_partial_states_show_the_same():
    first, second = PartialState(), PartialState()
    assert first.__dict__ is second.__dict__
    assert PartialState._shared_state["num_processes"] == 1
    assert first.device == torch.device("cpu")
    assert first.distributed_type is DistributedType.NO
    assert repr(first).startswith("Distributed environment: NO")


def test_threads_are_ranks_with_states_of_their_own():
    def ask():
        state = PartialState()
        return state.process_index, state.num_processes, state.distributed_type, state.is_last_process

    assert run_threads(2, ask) == [
        (0, 2, DistributedType.MULTI_CPU, False),
        (1, 2, DistributedType.MULTI_CPU, True),
    ]
    assert not PartialState._shared_state


def test_a_missing_attribute_is_an_attribute_error():
    Accelerator()
    assert getattr(AcceleratorState(), "fsdp_plugin", None) is None
    with pytest.raises(AttributeError, match="fsdp_plugin"):
        AcceleratorState().fsdp_plugin
    PartialState._reset_state()
    state = object.__new__(PartialState)
    with pytest.raises(AttributeError, match="nothing is initialised yet"):
        state.device


def test_the_accelerator_state_is_built_by_the_accelerator_only():
    with pytest.raises(ValueError, match="built by Accelerator"):
        AcceleratorState()
    assert not is_initialized()
    accelerator = Accelerator()
    assert is_initialized()
    assert AcceleratorState().device == accelerator.device
    assert AcceleratorState().process_index == 0
    assert AcceleratorState().mixed_precision == "no"


def test_another_precision_is_refused_until_a_reset():
    Accelerator(mixed_precision="bf16")
    with pytest.raises(ValueError, match="'bf16' already and cannot become 'no'"):
        Accelerator(mixed_precision="no")
    assert Accelerator().mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


def test_a_precision_that_cannot_be_leaves_nothing_behind(monkeypatch):
    for name in ("is_torchao_available", "is_transformer_engine_available"):
        monkeypatch.setattr(f"acc_plugins.precisions.choose_fp8.{name}", lambda: False)
    with pytest.raises(ValueError, match=r"acc-plugins\[torchao\]"):
        Accelerator(mixed_precision="fp8")
    assert not is_initialized()
    assert Accelerator().mixed_precision == "no"


def test_the_environment_names_the_precision(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert precision_name(None) == "bf16"
    assert precision_name("no") == "no"
    with pytest.raises(ValueError, match=r"one of .*got 'fp12'"):
        precision_name("fp12")


def test_the_state_speaks_for_the_current_world():
    assert PartialState().world is current_world()


def test_engines_that_are_not_in_use_are_none_or_absent_or_say_so():
    state = Accelerator().state
    assert [state.deepspeed_plugin, state.deepspeed_plugins, state.parallelism_config, state.device_mesh] == [
        None
    ] * 4
    assert not hasattr(state, "fsdp_plugin")
    assert not hasattr(state, "megatron_lm_plugin")
    assert state.dynamo_plugin.backend.value == "NO"
    assert not state.is_fsdp2
    with pytest.raises(ValueError, match="no DeepSpeed plugin 'student'"):
        state.get_deepspeed_plugin("student")
    with pytest.raises(ValueError, match="does not use DeepSpeed"):
        state.select_deepspeed_plugin("student")


def test_a_function_that_needs_deepspeed_asks_the_run_of_its_own_rank():
    @deepspeed_required
    def ask():
        return "called"

    def run():
        before = ask()
        Accelerator()
        with pytest.raises(ValueError, match="needs a run with DeepSpeed, and this one is MULTI_CPU"):
            ask()
        return before

    assert run_threads(2, run) == ["called", "called"]
    assert ask() == "called"
