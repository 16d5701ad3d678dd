"""`acc test`: launch a small script that checks that processes work together and train."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from acc_trainer.cli import launch

if TYPE_CHECKING:
    import argparse

USAGE = "usage: acc test [options of acc launch]"
TEXT = "Start a small script that checks ranks, gathering, broadcasting and training."
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_script.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bundled script through `acc launch` with the options given; its exit code comes back."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{TEXT}")
        return 0
    return launch.main([*words, _SCRIPT], command="acc test")


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028  no test
    """The arguments of the command for programs that parse them: a parser of its own, or one more of `subparsers`."""
    from acc_trainer.cli.parsing import parser_for  # noqa: PLC0415  the command itself starts without argparse

    parser = parser_for(subparsers, "test", TEXT, test_command)
    parser.add_argument(
        "--config_file", default=None, help="configuration file; default: that of `acc launch`"
    )
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the checks in processes of their own. SystemExit with their exit code when one fails, `LaunchError` when they cannot be started."""
    from acc_trainer.cli.launching import launch_command, launch_command_parser  # noqa: PLC0415  as above

    named = [] if args.config_file is None else ["--config_file", args.config_file]
    launch_command(launch_command_parser().parse_args([*named, _SCRIPT]))
