"""Megatron-LM's arguments from the options of `MegatronLMPlugin`, an optimizer, a scheduler; and which options exclude each other."""

from __future__ import annotations

import argparse
import logging
import re
from typing import TYPE_CHECKING, Any

from acc_ops.optional import require
from acc_ops.options import OptionError

if TYPE_CHECKING:
    from acc_plugins.options.megatron import MegatronLMPlugin

logger = logging.getLogger(__name__)
_SAME_NAME = (  # options that Megatron calls as we do
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "DDP_impl",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)
_NEEDS = (  # option, what it needs: name, test, in words
    ("pipeline_model_parallel_split_rank", "pp_degree", lambda degree: degree > 1, "pp_degree above 1"),
    ("num_layers_per_virtual_pipeline_stage", "pp_degree", lambda degree: degree > 1, "pp_degree above 1"),
    ("decoder_last_pipeline_num_layers", "pp_degree", lambda degree: degree > 1, "pp_degree above 1"),
    ("overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload", bool, "optimizer_cpu_offload=True"),
    ("use_precision_aware_optimizer", "use_distributed_optimizer", bool, "use_distributed_optimizer=True"),
    ("custom_train_step_kwargs", "custom_train_step_class", bool, "custom_train_step_class"),
)
_BY_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters")
_BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
_OPTIMIZER = re.compile(r"(?:Fused|DeepSpeedCPU|Paged)?(Adam|AdamW|SGD)(?:8bit|32bit)?")


def first_args(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """The arguments that are known when the plugin is built."""
    found = {name: getattr(plugin, name) for name in _SAME_NAME}
    found |= {
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "sequence_parallel": plugin.sequence_parallelism,
        "clip_grad": plugin.gradient_clipping,
    }
    return found if plugin.tensorboard_dir is None else {**found, "tensorboard_dir": plugin.tensorboard_dir}


def check_together(plugin: MegatronLMPlugin, given: set[str]) -> None:
    """OptionError for options that exclude each other; a log line for those without effect."""
    for name, other, holds, words in _NEEDS:
        if getattr(plugin, name) and not holds(getattr(plugin, other)):
            raise OptionError(
                f"{name}={getattr(plugin, name)!r} needs {words}, got {getattr(plugin, other)!r}"
            )
    split, stages = plugin.pipeline_model_parallel_split_rank, plugin.pp_degree or 1
    if split is not None and split >= stages:
        raise OptionError(f"pipeline_model_parallel_split_rank={split} must be below pp_degree={stages}")
    for name in ("attention_dropout", "hidden_dropout", "lr_warmup_fraction"):
        value = getattr(plugin, name)
        if value is not None and value > 1:
            raise OptionError(f"{name} must be between 0 and 1, got {value}")
    steps = [name for name in _BY_STEPS if name in given]
    samples = [name for name in _BY_SAMPLES if name in given]
    if steps and samples:
        raise OptionError(
            f"{steps[0]} counts steps and {samples[0]} samples: give all of them in one of the two"
        )
    warmups = [
        name for name in ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples") if name in given
    ]
    if len(warmups) > 1:
        raise OptionError(f"{warmups[0]} and {warmups[1]} both say how long to warm up: give one of them")
    _check_weight_decay(plugin)
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        logger.warning("sequence_parallelism has no effect with tp_degree=1")
    if plugin.set_all_logging_options and plugin.tensorboard_dir is None:
        logger.warning("set_all_logging_options has no effect without tensorboard_dir")


def _check_weight_decay(plugin: MegatronLMPlugin) -> None:
    ends = {name: getattr(plugin, name) for name in ("start_weight_decay", "end_weight_decay")}
    if plugin.weight_decay_incr_style != "constant":
        missing = next((name for name, value in ends.items() if value is None), None)
        if missing is not None:
            raise OptionError(f"weight_decay_incr_style={plugin.weight_decay_incr_style!r} needs {missing}")
    elif ends["start_weight_decay"] != ends["end_weight_decay"]:
        raise OptionError(
            f"start_weight_decay={ends['start_weight_decay']} and end_weight_decay={ends['end_weight_decay']} differ: "
            "give weight_decay_incr_style linear or cosine"
        )


def settle_recomputation(plugin: MegatronLMPlugin, given: set[str]) -> None:
    """`recompute_activations` is selective recomputation, which has neither a method nor a number of layers."""
    if plugin.recompute_activations:
        if "recompute_granularity" in given and plugin.recompute_granularity != "selective":
            raise OptionError(
                f"recompute_activations=True is recompute_granularity='selective', got {plugin.recompute_granularity!r}: give one of them"
            )
        plugin.recompute_granularity = "selective"
    if plugin.recompute_granularity == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if name in given:
                raise OptionError(f"{name} belongs to recompute_granularity='full': leave it out")
            setattr(plugin, name, None)


def optimizer_args(optimizer: Any) -> dict[str, Any]:
    """Megatron's optimizer arguments for an Adam, AdamW or SGD, by the name of the class or of one it derives from."""
    matches = (_OPTIMIZER.fullmatch(kind.__name__) for kind in type(optimizer).__mro__)
    name = next((found[1] for found in matches if found), None)
    if name is None:
        raise OptionError(f"Megatron-LM has no {type(optimizer).__name__}: use Adam, AdamW or SGD")
    settings = optimizer.defaults
    groups = optimizer.param_groups
    if any(group[key] != settings[key] for group in groups for key in ("lr", "weight_decay")):
        logger.warning(
            "the parameter groups of %s differ in lr or weight_decay, and Megatron-LM takes one of each, lr=%s and weight_decay=%s: say the rest "
            "by lr_mult, scale_lr_cond and no_wd_decay_cond",
            type(optimizer).__name__,
            settings["lr"],
            settings["weight_decay"],
        )
    found = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
    if name == "SGD":
        return {**found, "optimizer": "sgd", "sgd_momentum": settings["momentum"]}
    if settings["weight_decay"] and not settings.get("decoupled_weight_decay", name == "AdamW"):
        logger.warning("Megatron-LM's adam decays weights as AdamW does, not as Adam")
    first, second = settings["betas"]
    return {
        **found,
        "optimizer": "adam",
        "adam_beta1": first,
        "adam_beta2": second,
        "adam_eps": settings["eps"],
    }


def scheduler_args(plugin: MegatronLMPlugin, scheduler: Any) -> dict[str, Any]:
    """How long is trained, and how learning rate and weight decay move, in steps or in samples."""
    sizes = plugin.megatron_lm_default_args
    if "data_parallel_size" not in sizes:
        raise OptionError("set_scheduler_args needs the batch sizes: call set_training_args before it")
    by_samples = any(getattr(plugin, name) is not None for name in _BY_SAMPLES)
    # the scheduler's steps are those of all ranks; a sample-based run counts what a step of all ranks takes
    unit = sizes["global_batch_size"] if by_samples else 1
    total, warmup = (
        None if steps is None else steps // sizes["data_parallel_size"] * unit
        for steps in (scheduler.total_num_steps, scheduler.warmup_num_steps)
    )
    train, decay, warm = (getattr(plugin, name) for name in (_BY_SAMPLES if by_samples else _BY_STEPS))
    train = total if train is None else train
    if train is None:
        raise OptionError(
            "nothing says how long to train: give train_iters or train_samples, or total_num_steps of the scheduler"
        )
    if plugin.lr_warmup_fraction is not None:
        warm = 0  # Megatron refuses both
    elif warm is None:
        warm = warmup or 0
    ours, others = (_BY_SAMPLES, _BY_STEPS) if by_samples else (_BY_STEPS, _BY_SAMPLES)
    return {
        **dict(zip(ours, (train, decay, warm), strict=True)),
        **dict(zip(others, (None, None, 0), strict=True)),  # Megatron wants a warm-up of 0 there
        "lr_warmup_fraction": plugin.lr_warmup_fraction,
        "lr_decay_style": plugin.lr_decay_style,
        "weight_decay_incr_style": plugin.weight_decay_incr_style,
        "start_weight_decay": plugin.start_weight_decay,
        "end_weight_decay": plugin.end_weight_decay,
        "min_lr": plugin.min_lr,
    }


def logging_args() -> dict[str, Any]:
    """Every switch among Megatron-LM's logging arguments whose name begins with `log`, turned on."""
    declared = require("megatron.training.arguments", "set_all_logging_options, which asks Megatron-LM,")
    parser = argparse.ArgumentParser(add_help=False)
    declared._add_logging_args(parser)
    # a switch takes no value; log_interval, for one, does
    return {
        action.dest: True
        for action in parser._actions
        if action.nargs == 0 and action.dest.startswith("log_")
    }
