"""`acc env`: versions, devices and configuration, to paste into a report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from acc_trainer.launch.config_path import default_config_path
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.worker import inherited

if TYPE_CHECKING:
    import argparse

PACKAGES = ("acc_ops", "acc_hooks", "acc_bigmodel", "acc_plugins", "acc_trainer")
USAGE = "usage: acc env [--config_file FILE]"
TEXT = "Show versions, devices and configuration, to paste into a report."


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a report should say; exit code 2 for an unknown option or an unreadable configuration file."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{TEXT}")
        return 0
    try:
        _show(gather_facts(config_file_of(words, "acc env")))
    except LaunchError as error:
        print(f"acc env: {error}", file=sys.stderr)
        return 2
    return 0


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The arguments of the command: a parser of its own, or one more of `subparsers`."""
    from acc_trainer.cli.parsing import parser_for  # noqa: PLC0415  the command itself starts without argparse

    parser = parser_for(subparsers, "env", TEXT, env_command)
    parser.add_argument(
        "--config_file", default=None, help="the configuration file to show; default: that of `acc launch`"
    )
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a report should say; the same by name. `LaunchError` (a ValueError) for a configuration file that cannot be read."""
    facts = gather_facts(args.config_file)
    _show(facts)
    return facts


def gather_facts(config_file: str | None = None) -> dict[str, Any]:
    """What the command prints, by name. LaunchError when `config_file` cannot be read."""
    from acc_trainer.launch.config_file import read_config_file  # noqa: PLC0415  needs yaml

    environ = inherited()
    facts: dict[str, Any] = {name: import_module(f"{name}.__about__").__version__ for name in PACKAGES}
    facts["python"] = f"{platform.python_version()} ({sys.executable})"
    facts["platform"] = platform.platform()
    facts.update(_torch_facts())
    path = config_file or default_config_path(environ)
    if config_file is not None or os.path.isfile(path):
        facts["configuration"] = path
        facts.update({f"  {key}": value for key, value in read_config_file(path).items()})
    else:
        facts["configuration"] = f"none ({path} does not exist)"
    said = {
        name: value for name, value in sorted(environ.items()) if name.startswith(("ACCELERATE_", "ACC_"))
    }
    facts.update({f"${name}": value for name, value in said.items()})
    return facts


def _show(facts: dict[str, Any]) -> None:
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")


def _torch_facts() -> dict[str, Any]:
    import torch  # noqa: PLC0415  the command line starts without torch

    from acc_ops.devices import present_kind  # noqa: PLC0415  imports torch

    facts: dict[str, Any] = {"torch": torch.__version__, "accelerator": present_kind()}
    facts["cpu threads"] = torch.get_num_threads()
    return facts


def config_file_of(words: Sequence[str], command: str) -> str | None:
    """The value of --config_file, the only option of the small commands; LaunchError for anything else."""
    words = list(words)
    if not words:
        return None
    name, equals, value = words.pop(0).partition("=")
    if name.replace("-", "_") == "__config_file" and (equals or words):
        value = value if equals else words.pop(0)
        if not words:
            return value
    raise LaunchError(f"expected nothing but --config_file FILE; `{command} --help` says more")
