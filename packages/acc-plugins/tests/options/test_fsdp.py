"""The FSDP options: every field from argument, environment, flag and file; what contradicts itself is refused."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from acc_ops.options import OptionError, from_env, options_of, resolve, sources, to_env, to_mapping
from acc_plugins import FullyShardedDataParallelPlugin, get_module_class_from_name

VERSION_1: dict[str, tuple[str, Any]] = {  # field -> text, what it becomes
    "fsdp_version": ("1", 1),
    "sharding_strategy": ("NO_SHARD", fsdp.ShardingStrategy.NO_SHARD),
    "reshard_after_forward": ("3", fsdp.ShardingStrategy.NO_SHARD),
    "backward_prefetch": ("backward_post", fsdp.BackwardPrefetch.BACKWARD_POST),
    "auto_wrap_policy": ("SIZE_BASED_WRAP", wrap.size_based_auto_wrap_policy),
    "cpu_offload": ("yes", fsdp.CPUOffload(offload_params=True)),
    "ignored_modules": (r".*\.head", r".*\.head"),
    "state_dict_type": ("local", fsdp.StateDictType.LOCAL_STATE_DICT),
    "use_orig_params": ("true", True),
    "sync_module_states": ("true", True),
    "forward_prefetch": ("true", True),
    "activation_checkpointing": ("true", True),
    "cpu_ram_efficient_loading": ("true", True),
    "min_num_params": ("7", 7),
}
VERSION_2: dict[str, tuple[str, Any]] = {
    "fsdp_version": ("2", 2),
    "reshard_after_forward": ("false", False),
    "auto_wrap_policy": ("transformer_based_wrap", wrap.transformer_auto_wrap_policy),
    "cpu_offload": ("1", fsdp.CPUOffloadPolicy()),
    "ignored_modules": ("head", "head"),
    "state_dict_type": ("FULL_STATE_DICT", fsdp.StateDictType.FULL_STATE_DICT),
    "activation_checkpointing": ("true", True),
    "activation_checkpointing_offload": ("true", True),
    "cpu_ram_efficient_loading": ("true", True),
    "transformer_cls_names_to_wrap": ("Block,Layer", ["Block", "Layer"]),
}
SPELLED = {option.name: option for option in options_of(FullyShardedDataParallelPlugin)}


def test_every_field_with_a_variable_is_tried_below() -> None:
    assert {name for name, option in SPELLED.items() if option.env} == {*VERSION_1, *VERSION_2}
    assert all(option.help for option in SPELLED.values())


@pytest.mark.parametrize("wanted", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_each_layer_gives_every_field_and_the_environment_gives_it_back(
    wanted: dict[str, tuple[str, Any]], from_layer: Any
) -> None:
    cls, before = FullyShardedDataParallelPlugin, dict(os.environ)
    made = from_layer(cls, wanted)
    assert sources(made)["limit_all_gathers"] == "default"
    assert from_env(cls, to_env(made)) == made
    assert resolve(cls, file=to_mapping(made)) == made
    assert copy.deepcopy(made) == made
    assert dict(os.environ) == before


def test_defaults_follow_the_version() -> None:
    first, second = FullyShardedDataParallelPlugin(), FullyShardedDataParallelPlugin(fsdp_version=2)
    assert first.sharding_strategy is first.reshard_after_forward is fsdp.ShardingStrategy.FULL_SHARD
    assert first.state_dict_config == fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert first.cpu_offload == fsdp.CPUOffload(offload_params=False)
    assert first.use_orig_params is False
    assert second.reshard_after_forward is True
    assert second.sharding_strategy is None
    assert second.optim_state_dict_config == fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)
    assert type(second.cpu_offload) is fsdp.OffloadPolicy
    assert second.use_orig_params is None
    assert set(sources(first).values()) == {"default"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version"),
        ({"reshard_after_forward": True}, "fsdp_version=2"),
        ({"sharding_strategy": "FULL_SHRAD"}, "did you mean FULL_SHARD"),
        ({"sharding_strategy": 1, "reshard_after_forward": 2}, "contradict"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "reshard_after_forward"),
        ({"fsdp_version": 2, "reshard_after_forward": 1}, "true or false"),
        ({"fsdp_version": 2, "state_dict_type": "local"}, "use SHARDED_STATE_DICT"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch"),
        (
            {"activation_checkpointing_offload": True, "activation_checkpointing": True},
            "needs fsdp_version=2",
        ),
        ({"fsdp_version": 2, "activation_checkpointing_offload": True}, "needs activation_checkpointing"),
        ({"auto_wrap_policy": "size_wrap"}, "did you mean size_based_wrap"),
        ({"min_num_params": 1.5}, "whole number"),
        ({"min_num_params": -1}, "at least 0"),
        ({"ignored_modules": "("}, "no regular expression"),
        ({"cpu_offload": 3}, "cpu_offload"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload()}, "OffloadPolicy"),
        ({"mixed_precision_policy": "int4"}, "'int4'"),
        ({"mixed_precision_policy": 3}, "MixedPrecision"),
        ({"mixed_precision_policy": {"output_dtype": "bf16"}}, "no key 'output_dtype'"),
        ({"mixed_precision_policy": {"param_dtype": "b16"}}, "'b16'"),
    ],
)
def test_impossible_values_are_refused_when_it_is_built(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FullyShardedDataParallelPlugin(**given)


def test_fields_of_version_1_are_named_and_dropped_in_version_2(caplog: pytest.LogCaptureFixture) -> None:
    made = FullyShardedDataParallelPlugin(
        fsdp_version=2, use_orig_params=True, backward_prefetch="BACKWARD_PRE"
    )
    assert made.use_orig_params is None
    assert made.backward_prefetch is None
    assert "use_orig_params has no effect" in caplog.text
    assert "backward_prefetch has no effect" in caplog.text
    assert "sync_module_states" not in caplog.text


def test_mixed_precision_is_set_once_unless_overridden() -> None:
    made = FullyShardedDataParallelPlugin(mixed_precision_policy={"param_dtype": "bf16"})
    assert made.mixed_precision_policy == fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    made.set_mixed_precision("fp16")
    assert made.mixed_precision_policy.param_dtype is torch.bfloat16
    for name in ("fp16", torch.float16):
        made.set_mixed_precision(name, buffer_autocast=True, override=True)
        assert made.mixed_precision_policy == fsdp.MixedPrecision(torch.float16, torch.float16, torch.float32)
    with pytest.raises(OptionError, match=r"or such a torch dtype, got torch\.int8"):
        made.set_mixed_precision(torch.int8, override=True)
    made = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=torch.bfloat16)
    assert made.mixed_precision_policy.param_dtype is torch.bfloat16
    second = FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy="fp8"
    ).mixed_precision_policy
    assert second == fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def test_the_wrapping_policy_takes_classes_or_a_size_from_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    made = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear", "ReLU"]
    )
    made.set_auto_wrap_policy(model)
    assert isinstance(made.auto_wrap_policy, functools.partial)
    assert made.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear, nn.ReLU}}
    sized = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=9)
    sized.set_auto_wrap_policy(model)
    assert sized.auto_wrap_policy.keywords == {"min_num_params": 9}
    wrong = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Liner"]
    )
    with pytest.raises(OptionError, match="did you mean Linear"):
        wrong.set_auto_wrap_policy(model)


def test_a_class_is_found_by_name_at_any_depth() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    assert get_module_class_from_name(model, "ReLU") is nn.ReLU
    assert get_module_class_from_name(model, "GELU") is None


def test_the_default_that_accelerates_launcher_writes_for_version_2_does_no_harm_in_version_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    assert FullyShardedDataParallelPlugin(fsdp_version=1).sharding_strategy.name == "FULL_SHARD"
    with pytest.raises(OptionError, match="is for fsdp_version=2"):
        FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=True)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    with pytest.raises(OptionError, match="is for fsdp_version=2"):
        FullyShardedDataParallelPlugin(fsdp_version=1)
