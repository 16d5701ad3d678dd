"""`acc to-fsdp2`: a configuration file of FSDP version 1 as one of version 2.

[Note: what becomes of a key] `ARGUMENT_KEY_MAPPING` says for each: its name in version 2, or that version 2 has no such thing. A sharding strategy becomes
`fsdp_reshard_after_forward`: whether a block's weights are freed after its forward (`ARGUMENT_VALUE_MAPPING`). What the strategy said beside that
(copies between nodes, no shards at all) is said in a warning, and so is each key that is dropped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

from acc_trainer.cli.parsing import parser_for, run_command

logger = logging.getLogger(__name__)
TEXT = "Convert a configuration file of FSDP version 1 to version 2 (comments in it are lost)."


class ConversionStatus(Enum):
    """Why a key has no successor."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING = {
    "fsdp_sharding_strategy": _RESHARDS,
    "fsdp_reshard_after_forward": _RESHARDS,  # where version 1 of newer files has the strategy
}
_STRATEGIES = tuple(ARGUMENT_VALUE_MAPPING)
_NUMBERS = {  # torch.distributed.fsdp.ShardingStrategy
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
_MORE_THAN_RESHARDING = {
    "HYBRID_SHARD": "version 2 has copies between nodes by parallelism_config: set dp_replicate_size to the number of nodes, and dp_shard_size to the rest",
    "NO_SHARD": "version 2 always shards: leave FSDP out to train whole copies",
}
_MORE_THAN_RESHARDING["HYBRID_SHARD_ZERO2"] = _MORE_THAN_RESHARDING["HYBRID_SHARD"]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and say where the result is; exit code 1 when it cannot be done, 2 for wrong arguments."""

    def convert(args: argparse.Namespace) -> None:
        to_fsdp2_command(args)
        print(f"{args.output_file or args.config_file}: written")

    return run_command(to_fsdp2_command_parser(), argv, convert, ValueError, OSError)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The arguments of the command: a parser of its own, or one more of `subparsers`."""
    parser = parser_for(subparsers, "to-fsdp2", TEXT, to_fsdp2_command)
    parser.add_argument("--config_file", required=True, help="the file to convert")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write over the output file, or without one over the file itself",
    )
    parser.add_argument(
        "--output_file", default=None, help="where to write; default: the file itself, with --overwrite"
    )
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """What the command does with its parsed arguments.

    Raises ValueError without a place to write to and for a file that cannot be converted, FileNotFoundError for one that is not there, and
    FileExistsError for an output file that is there, without `overwrite`.
    """
    output = args.output_file
    if output is None and not args.overwrite:
        raise ValueError(
            "say where to write: --output_file FILE, or --overwrite to write over --config_file itself"
        )
    if not os.path.isfile(args.config_file):
        raise FileNotFoundError(f"--config_file {args.config_file} does not exist")
    output = output or args.config_file
    if os.path.exists(output) and not args.overwrite:
        raise FileExistsError(f"--output_file {output} exists: choose another one, or add --overwrite")
    _write(convert_config_to_fsdp2(load_config(args.config_file)), output)


def load_config(config_file: str) -> dict[str, Any]:
    """The keys and values of a YAML or JSON file. Raises ValueError for one that is empty or holds anything else."""
    import yaml  # noqa: PLC0415  the other commands start without it

    with open(config_file, encoding="utf-8") as file:
        try:
            content = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{config_file} is neither YAML nor JSON: {' '.join(str(error).split())}"
            ) from None
    if not content:
        raise ValueError(f"{config_file} is empty")
    if not isinstance(content, dict):
        raise ValueError(f"{config_file} must hold keys and values, found {type(content).__name__}")
    return content


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with its `fsdp_config` for version 2; the same object where it has none, or has version 2 already. The given one is not changed.

    Warns of each key that is dropped and of each strategy that said more. Raises ValueError for a strategy that is not known, and for two that differ.
    """
    settings = config.get("fsdp_config")
    if not settings:
        return config
    if not isinstance(settings, dict):
        raise ValueError(f"fsdp_config must hold keys and values, found {settings!r}")
    named = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in settings.items()}
    if str(named.get("fsdp_version", 1)) == "2":
        logger.warning(
            "fsdp_version is 2 already, nothing is converted; if the other keys are those of version 1, write fsdp_version: 1 first"
        )
        return config
    made: dict[str, Any] = {}
    for key, value in named.items():
        new = ARGUMENT_KEY_MAPPING.get(key, key)
        if new is ConversionStatus.REMOVED:
            logger.warning("%s is dropped: version 2 has no such option", key)
        elif new is ConversionStatus.NOT_YET_IMPLEMENTED:
            logger.warning("%s is dropped: version 2 has nothing like it yet", key)
        elif key not in _STRATEGIES:
            made[str(new)] = value
    if str(made.get("fsdp_state_dict_type")) == "LOCAL_STATE_DICT":
        logger.warning(
            "fsdp_state_dict_type LOCAL_STATE_DICT becomes SHARDED_STATE_DICT: version 2 has no other states in parts"
        )
        made["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    reshards = _reshards(named)
    if reshards is not None:
        made["fsdp_reshard_after_forward"] = reshards
    return {**config, "fsdp_config": {**made, "fsdp_version": 2}}


def _reshards(named: dict[str, Any]) -> bool | None:
    """What both names for the strategy of version 1 tell together; None where neither is there."""
    strategies: dict[str, str] = {}
    said: bool | None = None
    for key in _STRATEGIES:
        value = named.get(key)
        text = "" if value is None else str(value).strip().upper()
        if key == "fsdp_reshard_after_forward" and text in ("TRUE", "FALSE"):
            said = text == "TRUE"  # which version 1 does not look at
        elif text:
            strategies[key] = _NUMBERS.get(text, text)
    for key, strategy in strategies.items():
        if strategy not in _RESHARDS:
            raise ValueError(
                f"{key}: {named[key]} is no sharding strategy: write one of {', '.join(_RESHARDS)}"
            )
    if len(set(strategies.values())) > 1:
        raise ValueError(
            f"{' and '.join(f'{key}: {named[key]}' for key in strategies)} contradict each other: leave one of them out"
        )
    if not strategies:
        return said
    strategy = next(iter(strategies.values()))
    if strategy in _MORE_THAN_RESHARDING:
        logger.warning("%s: %s", strategy, _MORE_THAN_RESHARDING[strategy])
    if said not in (None, _RESHARDS[strategy]):
        logger.warning(
            "fsdp_reshard_after_forward: %s gives way to the sharding strategy, which counted in version 1",
            said,
        )
    return _RESHARDS[strategy]


def _write(config: dict[str, Any], path: str) -> None:
    """Whole or not at all: the file may be the one that was read."""
    import yaml  # noqa: PLC0415  as above

    text = (
        json.dumps(config, indent=2) + "\n"
        if path.endswith(".json")
        else yaml.safe_dump(config, sort_keys=False)
    )
    draft = f"{path}.writing"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    finally:
        if os.path.exists(draft):
            os.remove(draft)
