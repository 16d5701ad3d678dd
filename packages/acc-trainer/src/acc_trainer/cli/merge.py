"""`acc merge DIR OUT`: the shards that FSDP has written to one set of weights that everybody reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from acc_trainer.checkpoint.layout import CheckpointError
from acc_trainer.cli.parsing import run_command

TEXT = "Merge the weights that FSDP has written in shards (a folder pytorch_model_fsdp_0, or a checkpoint that holds one)."


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, and print the files; exit code 1 when it cannot be done, 2 for wrong arguments."""
    return run_command(merge_command_parser(), argv, merge_command, ValueError, OSError, CheckpointError)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The arguments of the command: a parser of its own, or one more of `subparsers`."""
    if subparsers is None:
        parser = argparse.ArgumentParser(prog="acc merge", description=TEXT)
    else:
        parser = subparsers.add_parser("merge-weights", description=TEXT)
    parser.add_argument("checkpoint_directory", help="the folder of shards, or the checkpoint that holds it")
    parser.add_argument("output_path", help="the folder to write into")
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin in the place of model.safetensors",
    )
    parser.add_argument(
        "--remove_checkpoint_dir",
        "--remove-checkpoint-dir",
        action="store_true",
        help="remove the folder of shards when its weights are merged",
    )
    parser.add_argument(
        "--max_shard_size",
        "--max-shard-size",
        default=None,
        help="write several files and an index where there are more bytes ('5GB'); default: one file",
    )
    if subparsers is not None:
        parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """What the command does with its parsed arguments. ValueError for a folder that holds no shards of weights, CheckpointError
    for an output that is a checkpoint, OSError of the disk."""
    from acc_plugins.states.merge import merge_shards  # noqa: PLC0415  the command line starts without torch

    files = merge_shards(
        args.checkpoint_directory,
        args.output_path,
        max_shard_size=getattr(args, "max_shard_size", None),
        safe_serialization=not args.unsafe_serialization,
        remove_checkpoint_dir=args.remove_checkpoint_dir,
    )
    print(f"{args.output_path}: {', '.join(files)}")
