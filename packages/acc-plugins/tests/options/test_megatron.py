"""The Megatron-LM options, and Megatron's arguments that follow from them."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.options import OptionError, from_env, options_of, resolve, sources, to_env, to_mapping
from acc_plugins import MegatronLMDummyScheduler, MegatronLMPlugin
from acc_plugins.options import megatron_args

BY_STEPS: dict[str, tuple[str, Any]] = {  # field -> text, what it becomes
    "tp_degree": ("2", 2),
    "pp_degree": ("4", 4),
    "use_custom_fsdp": ("true", True),
    "overlap_cpu_optimizer_d2h_h2d": ("true", True),
    "no_load_optim": ("true", True),
    "eod_mask_loss": ("true", True),
    "no_save_optim": ("true", True),
    "optimizer_cpu_offload": ("true", True),
    "use_precision_aware_optimizer": ("true", True),
    "decoder_last_pipeline_num_layers": ("3", 3),
    "recompute_granularity": ("full", "full"),
    "recompute_method": ("block", "block"),
    "recompute_num_layers": ("2", 2),
    "attention_backend": ("false", False),
    "expert_model_parallel_size": ("2", 2),
    "context_parallel_size": ("2", 2),
    "attention_dropout": ("0.1", 0.1),
    "hidden_dropout": ("0.2", 0.2),
    "attention_softmax_in_fp32": ("false", False),
    "expert_tensor_parallel_size": ("2", 2),
    "calculate_per_token_loss": ("false", False),
    "use_rotary_position_embeddings": ("false", False),
    "num_micro_batches": ("4", 4),
    "gradient_clipping": ("0", 0.0),
    "sequence_parallelism": ("true", True),
    "use_distributed_optimizer": ("true", True),
    "pipeline_model_parallel_split_rank": ("2", 2),
    "num_layers_per_virtual_pipeline_stage": ("1", 1),
    "is_train_batch_min": ("false", False),
    "train_iters": ("10", 10),
    "weight_decay_incr_style": ("cosine", "cosine"),
    "start_weight_decay": ("0.1", 0.1),
    "end_weight_decay": ("0.2", 0.2),
    "lr_decay_style": ("cosine", "cosine"),
    "lr_decay_iters": ("9", 9),
    "lr_warmup_iters": ("2", 2),
    "min_lr": ("0.01", 0.01),
    "consumed_samples": ("1,2,3", [1, 2, 3]),
    "lr_mult": ("2", 2.0),
    "megatron_dataset_flag": ("true", True),
    "seq_length": ("8", 8),
    "encoder_seq_length": ("8", 8),
    "decoder_seq_length": ("4", 4),
    "tensorboard_dir": ("/t", "/t"),
    "eval_iters": ("5", 5),
    "eval_interval": ("6", 6),
    "return_logits": ("true", True),
    "other_megatron_args": ('{"a": 1}', {"a": 1}),
}
BY_SAMPLES: dict[str, tuple[str, Any]] = {
    "recompute_activations": ("true", True),
    "train_samples": ("100", 100),
    "lr_decay_samples": ("90", 90),
    "lr_warmup_samples": ("10", 10),
    "set_all_logging_options": ("true", True),
}
BY_FRACTION: dict[str, tuple[str, Any]] = {"lr_warmup_fraction": ("0.1", 0.1)}
PYTHON = {
    "no_wd_decay_cond",
    "scale_lr_cond",
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_model_provider_function",
    "custom_prepare_model_function",
    "custom_megatron_datasets_provider_function",
    "custom_get_batch_function",
    "custom_loss_function",
}


def test_every_field_is_tried_below() -> None:
    declared = {option.name: option for option in options_of(MegatronLMPlugin)}
    assert set(declared) == {*BY_STEPS, *BY_SAMPLES, *BY_FRACTION, *PYTHON}
    assert all(option.help for option in declared.values())
    assert all(option.env is None for name, option in declared.items() if name in PYTHON)


@pytest.mark.parametrize("wanted", [BY_STEPS, BY_SAMPLES, BY_FRACTION], ids=["steps", "samples", "fraction"])
def test_each_layer_gives_every_field_and_the_file_gives_it_back(
    wanted: dict[str, tuple[str, Any]], from_layer: Any
) -> None:
    before = dict(os.environ)
    made = from_layer(MegatronLMPlugin, wanted)
    again = from_env(MegatronLMPlugin, to_env(made))
    spelled = [option.name for option in options_of(MegatronLMPlugin) if option.env]
    assert [getattr(again, name) for name in spelled] == [getattr(made, name) for name in spelled]
    assert resolve(MegatronLMPlugin, file=to_mapping(made)) == made
    assert copy.deepcopy(made) == made
    assert dict(os.environ) == before


def test_defaults_split_nothing_and_recompute_all() -> None:
    made = MegatronLMPlugin()
    assert set(sources(made).values()) == {"default"}
    found = made.megatron_lm_default_args
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    assert [found[name] for name in sizes] == [1, 1, 1]
    assert (found["DDP_impl"], found["clip_grad"], found["sequence_parallel"]) == ("torch", 1.0, False)
    assert (found["recompute_granularity"], found["recompute_num_layers"]) == ("full", 1)
    assert "tensorboard_dir" not in found


@pytest.mark.parametrize("given", [{"pp_degree": 2}, {"use_distributed_optimizer": True}])
def test_pipelines_and_the_distributed_optimizer_use_megatrons_own_ddp(given: dict[str, Any]) -> None:
    assert MegatronLMPlugin(**given).megatron_lm_default_args["DDP_impl"] == "local"


def test_consumed_samples_are_three_and_the_callers_list_stays() -> None:
    seen = [5]
    assert MegatronLMPlugin(consumed_samples=seen).consumed_samples == [5, 0, 0]
    assert seen == [5]


def test_selective_recomputation_has_neither_method_nor_layers() -> None:
    found = MegatronLMPlugin(recompute_activations=True).megatron_lm_default_args
    assert found["recompute_granularity"] == "selective"
    assert (found["recompute_method"], found["recompute_num_layers"]) == (None, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_degree": 0}, "tp_degree must be at least 1, got 0"),
        ({"gradient_clipping": -1}, "gradient_clipping must be at least 0"),
        ({"attention_dropout": 1.5}, "attention_dropout must be between 0 and 1, got 1.5"),
        ({"recompute_granularity": "some"}, "full, selective"),
        ({"lr_decay_style": "zigzag"}, "lr_decay_style"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "needs pp_degree above 1, got 1"),
        ({"pp_degree": 2, "pipeline_model_parallel_split_rank": 2}, "must be below pp_degree=2"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "needs optimizer_cpu_offload=True"),
        ({"use_precision_aware_optimizer": True}, "needs use_distributed_optimizer=True"),
        ({"custom_train_step_kwargs": {"a": 1}}, "needs custom_train_step_class"),
        ({"train_iters": 1, "train_samples": 1}, "train_iters counts steps and train_samples samples"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "both say how long to warm up"),
        ({"start_weight_decay": 0.1, "end_weight_decay": 0.2}, "give weight_decay_incr_style"),
        ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}, "needs end_weight_decay"),
        ({"recompute_activations": True, "recompute_granularity": "full"}, "give one of them"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recompute_method belongs to"),
    ],
)
def test_impossible_values_are_refused_when_it_is_built(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MegatronLMPlugin(**given)


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    MegatronLMPlugin(sequence_parallelism=True, set_all_logging_options=True)
    assert "sequence_parallelism has no effect with tp_degree=1" in caplog.text
    assert "set_all_logging_options has no effect without tensorboard_dir" in caplog.text


def test_other_arguments_win_over_all_that_comes_later() -> None:
    made = MegatronLMPlugin(
        other_megatron_args={"tensor_model_parallel_size": 9, "micro_batch_size": 7, "own": 1}
    )
    made.set_training_args(4, 2)
    found = made.megatron_lm_default_args
    assert (found["tensor_model_parallel_size"], found["micro_batch_size"], found["own"]) == (9, 7, 1)
    assert found["data_parallel_size"] == 2


def test_batch_sizes_multiply() -> None:
    made = MegatronLMPlugin(num_micro_batches=3)
    made.set_training_args(micro_batch_size=4, dp_degree=2)
    assert made.megatron_lm_default_args["global_batch_size"] == made.global_batch_size == 24


@pytest.mark.parametrize(("precision", "found"), [("fp16", {"fp16"}), ("bf16", {"bf16"}), ("no", set())])
def test_the_precision_of_the_run_is_told(precision: str, found: set[str]) -> None:
    made = MegatronLMPlugin()
    made.set_mixed_precision(precision)
    assert {"fp16", "bf16"} & set(made.megatron_lm_default_args) == found
    assert made.megatron_lm_default_args["DDP_impl"] == ("local" if precision == "bf16" else "torch")
    with pytest.raises(OptionError, match="'fp8'"):
        made.set_mixed_precision("fp8")


WEIGHT = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (
            torch.optim.AdamW([WEIGHT], lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4),
            {
                "optimizer": "adam",
                "adam_beta1": 0.1,
                "adam_beta2": 0.2,
                "adam_eps": 0.3,
                "lr": 0.5,
                "weight_decay": 0.4,
            },
        ),
        (
            torch.optim.SGD([WEIGHT], lr=0.5, momentum=0.1),
            {"optimizer": "sgd", "sgd_momentum": 0.1, "lr": 0.5, "weight_decay": 0},
        ),
    ],
    ids=["AdamW", "SGD"],
)
def test_an_optimizer_gives_its_settings(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
    made = MegatronLMPlugin()
    made.set_optimizer_type(optimizer)
    assert found.items() <= made.megatron_lm_default_args.items()


def test_what_megatrons_optimizer_does_otherwise_is_said(caplog: pytest.LogCaptureFixture) -> None:
    MegatronLMPlugin().set_optimizer_type(torch.optim.AdamW([{"params": [WEIGHT], "lr": 0.3}]))
    assert "the parameter groups of AdamW differ" in caplog.text
    MegatronLMPlugin().set_optimizer_type(torch.optim.Adam([WEIGHT], weight_decay=0.1))
    assert "decays weights as AdamW does" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.RMSprop])
def test_an_optimizer_that_megatron_has_not_is_refused(kind: Any) -> None:
    with pytest.raises(OptionError, match=f"no {kind.__name__}: use Adam"):
        MegatronLMPlugin().set_optimizer_type(kind([WEIGHT]))


@pytest.mark.parametrize(
    ("given", "scheduler", "found"),
    [
        (
            {},
            (100, 5),
            {"train_iters": 50, "lr_warmup_iters": 2, "train_samples": None, "lr_warmup_samples": 0},
        ),
        ({"train_iters": 7, "lr_warmup_iters": 3}, (100, 5), {"train_iters": 7, "lr_warmup_iters": 3}),
        ({"train_iters": 7, "lr_decay_iters": 6}, (None, 0), {"train_iters": 7, "lr_decay_iters": 6}),
        (
            {"train_iters": 7, "lr_warmup_fraction": 0.5},
            (100, 5),
            {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.5},
        ),
        (
            {"train_samples": 1000},
            (100, 5),
            {"train_samples": 1000, "lr_warmup_samples": 16, "train_iters": None, "lr_warmup_iters": 0},
        ),
        ({"lr_warmup_samples": 3}, (100, 5), {"train_samples": 400, "lr_warmup_samples": 3}),
    ],
)
def test_a_scheduler_says_how_long_where_no_field_does(
    given: Any, scheduler: Any, found: dict[str, Any]
) -> None:
    made = MegatronLMPlugin(**given)
    made.set_training_args(micro_batch_size=4, dp_degree=2)
    made.set_scheduler_args(MegatronLMDummyScheduler(None, *scheduler))
    assert found.items() <= made.megatron_lm_default_args.items()


def test_a_scheduler_needs_batch_sizes_and_somebody_who_says_how_long() -> None:
    made, dummy = MegatronLMPlugin(), MegatronLMDummyScheduler(None, other=1)
    assert dummy.kwargs == {"other": 1}
    with pytest.raises(OptionError, match="call set_training_args before"):
        made.set_scheduler_args(dummy)
    made.set_training_args(1, 1)
    with pytest.raises(OptionError, match="nothing says how long to train"):
        made.set_scheduler_args(dummy)


def test_all_logging_switches_are_those_that_megatron_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    def declare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--log-params-norm", action="store_true")
        parser.add_argument("--log-interval", type=int)
        parser.add_argument("--timing", action="store_true")

    library = SimpleNamespace(_add_logging_args=declare)
    monkeypatch.setattr(megatron_args, "require", lambda _name, _purpose: library)
    found = MegatronLMPlugin(tensorboard_dir="/t", set_all_logging_options=True).megatron_lm_default_args
    assert found["log_params_norm"] is True
    assert {"log_interval", "timing"}.isdisjoint(found)


def test_without_megatron_only_the_logging_switches_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match="set_all_logging_options"):
        MegatronLMPlugin(tensorboard_dir="/t", set_all_logging_options=True)
