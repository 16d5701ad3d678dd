"""`acc config default`: write a configuration file with default answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from acc_trainer.cli.config_args import default_json_config_file
from acc_trainer.launch.config_path import default_config_path
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.machine import count_accelerators
from acc_trainer.launch.options import PRECISIONS
from acc_trainer.launch.worker import inherited

if TYPE_CHECKING:
    import argparse

USAGE = "usage: acc config default [--config_file FILE] [--mixed_precision no|fp16|bf16|fp8]"
TEXT = "Write a configuration file for this machine; `acc launch` reads it."


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and say where; 0 also when there is one already, which is left alone; 2 for wrong arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help") or words in (["default", "-h"], ["default", "--help"]):
        print(f"{USAGE}\n\n{TEXT}")
        return 0 if words else 2
    try:
        return _default(words)
    except LaunchError as error:
        print(f"acc config: {error}", file=sys.stderr)
        return 2


def default_config(mixed_precision: str, accelerators: int) -> dict[str, object]:
    """The file's keys and values for a machine with so many accelerators. LaunchError for an unknown precision."""
    if mixed_precision not in PRECISIONS:
        raise LaunchError(
            f"--mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}"
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if accelerators > 1 else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(1, accelerators),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": accelerators == 0,
    }


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] = default_json_config_file
) -> Path | Literal[False]:
    """Write a configuration file for this machine, folders above it included; its path, or False where there is a file already, which stays.

    `LaunchError` (a ValueError) for a precision that is not known and a place where no file can be written.
    """
    content = default_config(str(mixed_precision).lower(), count_accelerators(inherited()))
    path = os.fspath(save_location)
    if not path:
        raise LaunchError("--config_file is empty: name the file to write")
    if os.path.isdir(path):
        raise LaunchError(f"--config_file {path} is a folder: name a file in it")
    if os.path.exists(path):
        print(f"{path} exists already and is left as it is; remove it to have a new one written")
        return False
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)  # JSON is YAML too, and is read without the yaml library
            file.write("\n")
    except OSError as error:
        raise LaunchError(f"--config_file {path} cannot be written: {error.strerror}") from None
    return Path(path)


def default_command_parser(
    parser: Any, parents: Sequence[argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """`default` as one more command of the subparsers `parser`."""
    made: argparse.ArgumentParser = parser.add_parser(
        "default", parents=list(parents), description=TEXT, help=TEXT
    )
    made.add_argument(
        "--config_file", "--config-file", default=default_json_config_file, help="where to write the file"
    )
    made.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        choices=PRECISIONS,
        default="no",
        help="precision of the forward pass",
    )
    made.set_defaults(func=default_config_command)
    return made


def default_config_command(args: argparse.Namespace) -> None:
    """Write the file that a namespace asks for, and say where it is."""
    path = write_basic_config(args.mixed_precision, args.config_file)
    if path:
        print(f"configuration written to {path}")


def _default(words: list[str]) -> int:
    if words.pop(0) != "default":
        raise LaunchError(f"only `acc config default` is built so far. {USAGE}")
    environ = inherited()
    values = {"config_file": default_config_path(environ), "mixed_precision": "no"}
    while words:
        name, equals, value = words.pop(0).partition("=")
        key = name.lstrip("-").replace("-", "_")
        if key not in values or not name.startswith("--") or not (equals or words):
            raise LaunchError(f"unknown option or missing value: {name}. {USAGE}")
        values[key] = value if equals else words.pop(0)
    path = write_basic_config(values["mixed_precision"], values["config_file"])
    if path is False:
        return 0
    print(f"configuration written to {path}")
    return 0
