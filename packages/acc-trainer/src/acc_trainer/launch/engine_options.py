"""The launcher's options for engines that plugins declare (torch.compile, FSDP, parallelism, fp8), and which of them a worker is told.

[Note: what a worker is told] Flag, variable, help and choices are the plugin's own; the launcher adds a default where the specification's differs from
the plugin's. A worker gets what was said, and those defaults; nothing of an engine that is not turned on. So a launcher's default never
contradicts what the engine of another version takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acc_ops.enums import DynamoBackend
from acc_ops.options import Option, OptionError, option, options_of, to_env
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.options.fp8 import AORecipeKwargs, LinearOverrides, MSAMPRecipeKwargs, TERecipeKwargs
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)

_PLUGINS = (
    TorchDynamoPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
    DeepSpeedSequenceParallelConfig,
    AORecipeKwargs,
    TERecipeKwargs,
    MSAMPRecipeKwargs,
)
_DECLARED: dict[str | None, Option] = {
    declared.flag: declared for kind in _PLUGINS for declared in options_of(kind)
}


def _plugins(flag: str, default: Any = None, **more: Any) -> Any:
    """The launcher's option for a field of a plugin, as that declares it, with the launcher's default."""
    declared = _DECLARED[flag]
    kept = {name: getattr(declared, name) for name in ("env", "help", "choices", "parse")}
    return option(default, **{**kept, **more})


@dataclass(
    frozen=True, kw_only=True, init=False, repr=False, eq=False
)  # declares only: LaunchOptions has the methods
class EngineOptions:
    """What can be said to `acc launch` about engines."""

    dynamo_backend: str = _plugins(
        "dynamo_backend", "no", choices=[name.lower() for name in DynamoBackend.list()], parse=str.lower
    )
    dynamo_mode: str = _plugins("dynamo_mode", "default")
    dynamo_use_fullgraph: bool = _plugins("dynamo_use_fullgraph", False)
    dynamo_use_dynamic: bool | None = _plugins("dynamo_use_dynamic")
    dynamo_use_regional_compilation: bool = _plugins("dynamo_use_regional_compilation", False)

    use_fsdp: bool = option(False, env="ACCELERATE_USE_FSDP", help="shard models with torch's FSDP")
    fsdp_version: int = _plugins("fsdp_version", 1)
    fsdp_sharding_strategy: str | None = _plugins("fsdp_sharding_strategy", "FULL_SHARD")
    fsdp_reshard_after_forward: Any = _plugins("fsdp_reshard_after_forward", True)  # noqa: RUF009  only declares
    fsdp_auto_wrap_policy: str | None = _plugins("fsdp_auto_wrap_policy")
    fsdp_transformer_layer_cls_to_wrap: list[str] | None = _plugins(  # noqa: RUF009  only declares
        "fsdp_transformer_layer_cls_to_wrap"
    )
    fsdp_min_num_params: int = _plugins("fsdp_min_num_params", 100_000_000)
    fsdp_ignored_modules: str | None = _plugins("fsdp_ignored_modules")
    fsdp_offload_params: bool = _plugins("fsdp_offload_params", False)
    fsdp_state_dict_type: str | None = _plugins("fsdp_state_dict_type")
    fsdp_use_orig_params: bool = _plugins("fsdp_use_orig_params", True)
    fsdp_sync_module_states: bool = _plugins("fsdp_sync_module_states", True)
    fsdp_cpu_ram_efficient_loading: bool = _plugins("fsdp_cpu_ram_efficient_loading", True)
    fsdp_backward_prefetch: str | None = _plugins("fsdp_backward_prefetch")
    fsdp_forward_prefetch: bool = _plugins("fsdp_forward_prefetch", False)
    fsdp_activation_checkpointing: bool = _plugins("fsdp_activation_checkpointing", False)
    fsdp_activation_checkpointing_offload: bool = _plugins("fsdp_activation_checkpointing_offload", False)

    use_parallelism_config: bool = option(
        False, env="ACCELERATE_USE_PARALLELISM_CONFIG", help="lay the processes out along several axes"
    )
    parallelism_config_dp_replicate_size: int = _plugins("parallelism_config_dp_replicate_size", 1)
    parallelism_config_dp_shard_size: int = _plugins("parallelism_config_dp_shard_size", 1)
    parallelism_config_tp_size: int = _plugins("parallelism_config_tp_size", 1)
    parallelism_config_cp_size: int = _plugins("parallelism_config_cp_size", 1)
    parallelism_config_cp_backend: str = _plugins(
        "parallelism_config_cp_backend", "torch", choices=("torch",)
    )
    parallelism_config_cp_comm_strategy: str = _plugins(
        "parallelism_config_cp_comm_strategy", "allgather", choices=("allgather", "alltoall")
    )
    parallelism_config_sp_size: int = _plugins("parallelism_config_sp_size", 1)
    parallelism_config_sp_backend: str = _plugins(
        "parallelism_config_sp_backend", "deepspeed", choices=("deepspeed",)
    )
    parallelism_config_sp_seq_length: int | None = _plugins("parallelism_config_sp_seq_length")
    parallelism_config_sp_seq_length_is_variable: bool = _plugins(
        "parallelism_config_sp_seq_length_is_variable", True
    )
    parallelism_config_sp_attn_implementation: str = _plugins(
        "parallelism_config_sp_attn_implementation", "sdpa"
    )

    fp8_backend: str | None = option(
        None,
        env="ACCELERATE_FP8_BACKEND",
        choices=("AO", "TE", "MSAMP", "NO"),
        parse=str.upper,
        help="the library that computes in fp8; default: the first installed",
    )
    fp8_pad_inner_dim: bool = _plugins("fp8_pad_inner_dim", True)
    fp8_enable_fsdp_float8_all_gather: bool = _plugins("fp8_enable_fsdp_float8_all_gather", True)
    fp8_use_autocast_during_eval: bool = _plugins("fp8_use_autocast_during_eval", False)
    fp8_margin: int = _plugins("fp8_margin", 0)
    fp8_interval: int = _plugins("fp8_interval", 1)
    fp8_format: str = _plugins("fp8_format", "HYBRID", choices=("HYBRID", "E4M3", "E5M2"), parse=str.upper)
    fp8_amax_history_len: int = _plugins("fp8_amax_history_len", 1024)
    fp8_amax_compute_algo: str = _plugins(
        "fp8_amax_compute_algo", "most_recent", choices=("max", "most_recent")
    )
    fp8_use_mxfp8_block_scaling: bool = _plugins("fp8_use_mxfp8_block_scaling", False)
    fp8_override_linear_precision: tuple[bool, bool, bool] = option(
        (False, False, False),
        help="linear layers compute forward, input gradient, weight gradient in higher precision: three of true and false",
    )
    fp8_opt_level: str = _plugins("fp8_opt_level", "O2", choices=("O1", "O2"))


ENGINE_SECTIONS = {  # heading of `acc launch --help`: how the engine is turned on
    "FSDP": "--use_fsdp",
    "Parallelism": "--use_parallelism_config",
    "fp8": "--mixed_precision fp8",
}
_PREFIXES = {"FSDP": "fsdp_", "Parallelism": "parallelism_config_", "fp8": "fp8_"}


def names_of(section: str) -> tuple[str, ...]:
    """The options that tune the engine of a section, in order."""
    prefix = _PREFIXES[section]
    return tuple(chosen.name for chosen in options_of(EngineOptions) if chosen.name.startswith(prefix))


def not_for_workers(options: Any, origins: Mapping[str, str]) -> set[str]:
    """The options whose variables a worker does not get: of engines that are off, and defaults that are the plugin's own."""
    told: set[str] = set()
    tuning: set[str] = set()
    for section in ENGINE_SECTIONS:
        names = names_of(section)
        tuning.update(names)
        if _is_on(options, section):
            told.update(name for name in names if origins[name] != "default")
    if options.use_fsdp:
        told.update({"fsdp_version", "fsdp_cpu_ram_efficient_loading"})
        if options.fsdp_version == 1:
            told.update({"fsdp_use_orig_params", "fsdp_sync_module_states"})
        if "size" in (options.fsdp_auto_wrap_policy or "").lower():
            told.add("fsdp_min_num_params")
    switches = {name for name in ("use_fsdp", "use_parallelism_config") if origins[name] == "default"}
    return (tuning - told) | switches


def override_variables(options: Any, origins: Mapping[str, str]) -> dict[str, str]:
    """The three variables of `fp8_override_linear_precision`, where that was said and counts."""
    if not _is_on(options, "fp8") or origins["fp8_override_linear_precision"] == "default":
        return {}
    return to_env(LinearOverrides(*options.fp8_override_linear_precision))


def without_effect(options: Any, origins: Mapping[str, str]) -> list[str]:
    """A note for each engine that was tuned and not turned on."""
    notes = []
    for section, how in ENGINE_SECTIONS.items():
        said = [name for name in names_of(section) if origins[name] in ("argument", "file")]
        if said and not _is_on(options, section):
            notes.append(f"{', '.join(said)}: no effect without {how}")
    return notes


def check_engines(options: Any, num_processes: int) -> None:
    """Raise OptionError for engines that do not fit together or do not fit the number of processes."""
    if len(options.fp8_override_linear_precision) != 3:
        raise OptionError(
            f"--fp8_override_linear_precision takes three of true and false, as in true,false,false, got "
            f"{options.fp8_override_linear_precision}"
        )
    if not options.use_parallelism_config:
        return
    if options.use_fsdp and options.fsdp_version != 2:
        raise OptionError(
            f"--use_parallelism_config needs --fsdp_version 2, got {options.fsdp_version}: say it, or leave one of the two out "
            "(version 1 has --fsdp_sharding_strategy HYBRID_SHARD)"
        )
    sizes = {
        axis: getattr(options, f"parallelism_config_{axis}_size")
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if sizes["dp_shard"] > 1 and not options.use_fsdp:
        raise OptionError(
            f"--parallelism_config_dp_shard_size {sizes['dp_shard']} shards the model, which FSDP does: add --use_fsdp --fsdp_version 2"
        )
    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    if config.total_size not in (1, num_processes):
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise OptionError(
            f"{shown} of --parallelism_config_*_size makes {config.total_size} processes, but there are {num_processes}: change one of them"
        )


def _is_on(options: Any, section: str) -> bool:
    if section == "fp8":
        return bool(options.mixed_precision == "fp8")
    return bool(options.use_fsdp if section == "FSDP" else options.use_parallelism_config)
