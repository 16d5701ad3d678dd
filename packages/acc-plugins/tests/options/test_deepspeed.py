"""The DeepSpeed options: from every layer, together with a configuration, and what becomes of its "auto" values."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given as drawn_from
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from acc_ops.options import OptionError, from_env, options_of, resolve, sources, to_env, to_mapping
from acc_plugins import DeepSpeedPlugin, HfDeepSpeedConfig
from acc_plugins.options import deepspeed

WANTED: dict[str, tuple[str, Any]] = {  # field -> text, what it becomes
    "gradient_accumulation_steps": ("4", 4),
    "gradient_clipping": ("0.5", 0.5),
    "zero_stage": ("3", 3),
    "is_train_batch_min": ("false", False),
    "offload_optimizer_device": ("NVMe", "nvme"),
    "offload_param_device": ("nvme", "nvme"),
    "offload_optimizer_nvme_path": ("/a", "/a"),
    "offload_param_nvme_path": ("/b", "/b"),
    "zero3_init_flag": ("false", False),
    "zero3_save_16bit_model": ("true", True),
    "transformer_moe_cls_names": ("Expert,Gate", "Expert,Gate"),
}
MSAMP: dict[str, tuple[str, Any]] = {"enable_msamp": ("msamp", True), "msamp_opt_level": ("O2", "O2")}
ZERO = {"zero_optimization": {"stage": 1}}


def test_every_field_is_tried_below() -> None:
    declared = {option.name: option for option in options_of(DeepSpeedPlugin)}
    assert set(declared) == {"hf_ds_config", *WANTED, *MSAMP}
    assert all(option.help for option in declared.values())


@pytest.mark.parametrize("wanted", [WANTED, MSAMP], ids=["options", "8 bit"])
def test_each_layer_gives_every_field_and_the_environment_gives_it_back(
    wanted: dict[str, tuple[str, Any]], from_layer: Any
) -> None:
    before = dict(os.environ)
    made = from_layer(DeepSpeedPlugin, wanted)
    again = from_env(DeepSpeedPlugin, to_env(made))
    assert again == DeepSpeedPlugin(**{**_vars_of(made), "is_train_batch_min": True})
    assert resolve(DeepSpeedPlugin, file=to_mapping(made)) == made
    assert copy.deepcopy(made) == made
    assert dict(os.environ) == before


def _vars_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    return {option.name: getattr(plugin, option.name) for option in options_of(DeepSpeedPlugin)[1:]}


def test_without_anything_it_is_stage_2_and_the_rest_is_filled_in_later() -> None:
    made = DeepSpeedPlugin()
    assert made.deepspeed_config is made.hf_ds_config.config
    assert made.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": math.inf,
    }
    assert set(sources(made).values()) == {"default"}
    assert (made.zero3_init_flag, made.enable_msamp, made.msamp_opt_level) == (False, False, "O1")
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag is True


def test_options_reach_the_configuration() -> None:
    config = DeepSpeedPlugin(
        zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/n"
    ).hf_ds_config
    assert config.is_zero3()
    assert config.is_offload()
    assert config.get_value("zero_optimization.offload_param") == {"device": "nvme", "nvme_path": "/n"}
    assert DeepSpeedPlugin(enable_msamp=True).deepspeed_config["msamp"] == {
        "enabled": True,
        "opt_level": "O1",
    }
    other = from_env(
        DeepSpeedPlugin, {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}
    )
    assert other == DeepSpeedPlugin()


def test_a_configuration_fills_the_options_and_auto_in_it_is_filled_by_them() -> None:
    given = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "steps_per_print": 10,
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}},
    }
    made = DeepSpeedPlugin(given, gradient_clipping=1.5)
    assert (made.gradient_accumulation_steps, made.zero_stage, made.offload_optimizer_device) == (2, 2, "cpu")
    assert made.deepspeed_config == {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.5,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    told = sources(made)
    assert (told["gradient_accumulation_steps"], told["gradient_clipping"]) == ("file", "argument")
    assert given["gradient_clipping"] == "auto"


def test_what_a_configuration_leaves_out_is_written_where_it_is_given() -> None:
    made = DeepSpeedPlugin({"zero_optimization": {}}, zero_stage=2, gradient_clipping=1.0)
    assert made.deepspeed_config["zero_optimization"] == {"stage": 2}
    assert made.deepspeed_config["gradient_clipping"] == 1.0
    bare = DeepSpeedPlugin({"zero_optimization": {}})
    assert (bare.zero_stage, bare.gradient_accumulation_steps) == (0, 1)
    assert bare.deepspeed_config["gradient_accumulation_steps"] == 1
    assert "gradient_clipping" not in bare.deepspeed_config


def test_a_configuration_object_stays_the_callers_and_survives_the_environment(tmp_path: Path) -> None:
    config = HfDeepSpeedConfig(ZERO)
    assert DeepSpeedPlugin(config).hf_ds_config is config
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO))
    for source in (dict(ZERO), str(path)):
        made = DeepSpeedPlugin(source)
        assert from_env(DeepSpeedPlugin, to_env(made)) == made
        assert from_env(DeepSpeedPlugin, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(ZERO)}) == made
    assert to_env(made)["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(path)


VALUES = {  # field -> a value for the configuration or the option
    "gradient_accumulation_steps": st.integers(1, 9),
    "gradient_clipping": st.floats(0, 9),
    "zero_stage": st.integers(1, 3),
    "offload_optimizer_device": st.sampled_from(["none", "cpu"]),
    "zero3_save_16bit_model": st.booleans(),
}
STATES = st.sampled_from(["absent", "auto", "said"])


@settings(max_examples=60)
@drawn_from(
    st.fixed_dictionaries({name: st.tuples(STATES, st.booleans(), value) for name, value in VALUES.items()})
)
def test_option_and_configuration_tell_the_same_whoever_said_it(
    drawn: dict[str, tuple[str, bool, Any]],
) -> None:
    config, given_here = HfDeepSpeedConfig({"zero_optimization": {}}), {}
    for name, (state, option_too, value) in drawn.items():
        if state != "absent":
            config.set_value(deepspeed._KEYS[name], "auto" if state == "auto" else value)
        if option_too:
            given_here[name] = value
    before = copy.deepcopy(config.config)
    made = DeepSpeedPlugin(config.config, **given_here)
    assert config.config == before
    for name, (state, option_too, value) in drawn.items():
        in_config = made.get_value(deepspeed._KEYS[name])
        assert state == "absent" or in_config == getattr(made, name)
        if state == "said" or option_too:
            assert getattr(made, name) == value
            # what is absent means the same as a value of DeepSpeed's own default
            assert in_config == value or (in_config is None and value == deepspeed._OF_DEEPSPEED[name])
    assert from_env(DeepSpeedPlugin, to_env(made)) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_stage": 4}, "expected one of 0, 1, 2, 3, got 4"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"gradient_accumulation_steps": "some"}, "gradient_accumulation_steps"),
        ({"gradient_clipping": -1}, "gradient_clipping must be at least 0"),
        ({"offload_optimizer_device": "disk"}, "none, cpu, nvme"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "give offload_param_nvme_path"),
        (
            {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/n"},
            "needs zero_stage=3, got 2",
        ),
        ({"enable_msamp": True, "zero_stage": 3}, "MS-AMP"),
        ({"msamp_opt_level": "O3"}, "O1"),
        ({"hf_ds_config": {"fp16": {}}}, 'no "zero_optimization" section'),
        ({"hf_ds_config": {"zero_optimization": {"stage": 7}}}, "zero_stage: expected one of"),
        ({"hf_ds_config": 3}, "got 3"),
        (
            {"hf_ds_config": ZERO, "zero_stage": 3},
            "zero_stage is 1 in the DeepSpeed configuration, 3 by the argument",
        ),
    ],
)
def test_impossible_values_are_refused_when_it_is_built(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DeepSpeedPlugin(**given)


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True, offload_param_device="cpu")
    assert made.zero3_init_flag is False
    assert "zero3_init_flag has no effect with zero_stage=2" in caplog.text
    assert "offload_param_device has no effect with zero_stage=2" in caplog.text


def test_a_variable_must_not_contradict_the_configuration_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(
        OptionError, match="zero_stage is 1 in the DeepSpeed configuration, 3 by the environment"
    ):
        DeepSpeedPlugin(ZERO)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage,zero3_init_flag")
    with pytest.raises(OptionError, match="3 by the launcher's file"):
        DeepSpeedPlugin(ZERO)
    assert DeepSpeedPlugin({"zero_optimization": {"stage": "auto"}}).zero_stage == 3
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert DeepSpeedPlugin(ZERO).zero_stage == 1


FULL = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
}


def test_auto_values_are_filled_by_dotted_keys_and_the_options_follow() -> None:
    made = DeepSpeedPlugin(FULL)
    assert made.is_auto("optimizer.params.lr")
    made.deepspeed_config_process(
        **{
            "train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "optimizer.params.lr": 0.5,
            "unknown.key": 1,
        }
    )
    assert made.get_value("optimizer.params") == {"lr": 0.5, "weight_decay": 0.1}
    assert made.get_value("train_batch_size") == 8
    assert made.gradient_accumulation_steps == 4
    assert made.get_value("unknown.key", "none") == "none"


def test_all_values_that_differ_are_named_at_once() -> None:
    made = DeepSpeedPlugin({**FULL, "train_batch_size": 16})
    kwargs = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer.params.lr": 1,
        "optimizer.params.weight_decay": 0,
    }
    with pytest.raises(
        OptionError, match=r"(?s)train_batch_size is 16 .* 8 here.*weight_decay is 0\.1 .* 0 here"
    ):
        made.deepspeed_config_process(**kwargs)
    made.deepspeed_config_process(must_match=False, **kwargs)
    assert made.get_value("train_batch_size") == 16


def test_an_auto_value_without_an_answer_is_an_error_where_it_must_match() -> None:
    made = DeepSpeedPlugin(FULL)
    with pytest.raises(OptionError, match='"auto" for train_batch_size'):
        made.deepspeed_config_process()
    made.deepspeed_config_process(must_match=False)
    assert made.is_auto("train_batch_size")


def test_one_value_is_matched_into_a_list_or_at_once() -> None:
    made, found = DeepSpeedPlugin(FULL), []
    made.fill_match("optimizer.params.weight_decay", found, **{"optimizer.params.weight_decay": 1})
    assert len(found) == 1
    with pytest.raises(OptionError, match=r"weight_decay is 0\.1"):
        made.fill_match("optimizer.params.weight_decay", **{"optimizer.params.weight_decay": 1})


@pytest.mark.parametrize(
    ("config", "precision", "fp16", "bf16"),
    [
        ({}, "no", {"enabled": False}, {"enabled": False}),
        ({}, None, {"enabled": False}, {"enabled": False}),
        ({}, "fp16", {"enabled": True, "auto_cast": True}, {"enabled": False}),
        ({}, "bf16", {"enabled": False}, {"enabled": True}),
        ({}, "fp8", {"enabled": False}, {"enabled": True}),
        (
            {"fp16": {"enabled": "auto", "loss_scale": 0}},
            "fp16",
            {"enabled": True, "loss_scale": 0},
            {"enabled": False},
        ),
        ({"fp16": {"enabled": True}}, "no", {"enabled": True}, {"enabled": False}),
        ({"bf16": {"enabled": True}}, "bf16", {"enabled": False}, {"enabled": True}),
    ],
)
def test_the_precision_of_the_run_is_written(config: Any, precision: Any, fp16: Any, bf16: Any) -> None:
    made = DeepSpeedPlugin({**ZERO, **config})
    made.set_mixed_precision(precision)
    assert (made.deepspeed_config["fp16"], made.deepspeed_config["bf16"]) == (fp16, bf16)


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"bf16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": False}}, "fp16"),
        ({}, "int8"),
    ],
)
def test_a_precision_that_contradicts_the_configuration_is_refused(config: Any, precision: str) -> None:
    with pytest.raises(OptionError, match=precision):
        DeepSpeedPlugin({**ZERO, **config}).set_mixed_precision(precision)


def test_only_the_state_selects_a_plugin() -> None:
    made = DeepSpeedPlugin()
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        made.select()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        made.selected = True
    made.select(_from_accelerator_state=True)
    assert made.selected
    made._unselect()
    assert not made.selected


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(HfDeepSpeedConfig=lambda config: SimpleNamespace(config=config))
    monkeypatch.setattr(deepspeed, "is_available", lambda name: name in ("transformers", "deepspeed"))
    monkeypatch.setattr(deepspeed, "require", lambda _name, _purpose: library)


def test_transformers_sees_a_configuration_with_numbers_while_a_stage_3_plugin_is_selected(
    transformers: None,
) -> None:
    made = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2)
    made.select(_from_accelerator_state=True)
    assert made.dschf.config["train_micro_batch_size_per_gpu"] == 1
    assert made.dschf.config["gradient_accumulation_steps"] == 2
    assert "train_batch_size" not in made.dschf.config
    assert made.is_auto("train_micro_batch_size_per_gpu")
    with pytest.raises(KeyError), made.zero3_init_context_manager(enable=False):
        assert (made.is_zero3_init_enabled(), made.dschf) == (False, None)
        raise KeyError
    assert made.is_zero3_init_enabled()
    assert made.dschf is not None
    made._unselect()
    assert made.dschf is None
    second = DeepSpeedPlugin(zero_stage=2)
    second.select(_from_accelerator_state=True)
    assert second.dschf is None


def test_expert_layers_become_leaves_by_the_names_of_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    library = SimpleNamespace(set_z3_leaf_modules=lambda model, classes: seen.append((model, classes)))
    monkeypatch.setattr(deepspeed, "require", lambda _name, _purpose, extra: library)
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    assert seen == []
    DeepSpeedPlugin(transformer_moe_cls_names="Linear, ReLU").set_moe_leaf_modules(model)
    assert seen == [(model, [nn.Linear, nn.ReLU])]
    with pytest.raises(OptionError, match="'Liner': did you mean Linear"):
        DeepSpeedPlugin(transformer_moe_cls_names="Liner").set_moe_leaf_modules(model)


def test_deepspeed_is_needed_for_leaves_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="transformer_moe_cls_names needs deepspeed"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linear").set_moe_leaf_modules(nn.Linear(1, 1))
