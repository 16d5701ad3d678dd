"""`acc launch` for programs that parse their command line by argparse: a parser of its options, and what a namespace of it starts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from acc_ops.options import Option, attach_values, options_of
from acc_trainer.cli.parsing import CustomArgumentParser, parser_for
from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.namespaces import plan_of
from acc_trainer.launch.options import SECTIONS, SHORT, LaunchOptions
from acc_trainer.launch.plan import IN_PLACE, SUPERVISED
from acc_trainer.launch.run import run_plan
from acc_trainer.launch.worker import inherited

TEXT = "Start a script on this machine's processes, or on several machines."


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The options of `acc launch`, the script, and its arguments: a parser of its own, or one more of `subparsers`.

    What was not said is None, so that the configuration file can say it; `nondefault` has the names of what was said.
    """
    parser = parser_for(subparsers, "launch", TEXT, launch_command, _Parser)
    options = {chosen.name: chosen for chosen in options_of(LaunchOptions)}
    short = {name: spelled for spelled, name in SHORT.items()}
    for title, names in SECTIONS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, options[name], short.get(name))
    parser.add_argument(
        "training_script", help="the script, which is started with everything that comes after it"
    )
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="the arguments of the script")
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start what the namespace says, and wait. SystemExit with the exit code of the first worker that failed.

    `LaunchError` (a ValueError) for what cannot be started. Unlike `acc launch` this process stays what it is when there is one worker only.
    """
    plan = plan_of(args)
    if plan.options.dry_run:
        print(plan)
        return
    if not plan.options.quiet:
        for note in plan.notes:
            print(f"acc launch: {note}", file=sys.stderr, flush=True)
    if plan.runner == IN_PLACE:
        plan = replace(plan, runner=SUPERVISED)
    code = run_plan(plan, inherited())
    if code:
        raise SystemExit(code)


class _Parser(CustomArgumentParser):
    """A switch before the script does not take it for its value."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = attach_values(sys.argv[1:] if args is None else args, LaunchOptions, short=SHORT)
        given, unknown = super().parse_known_args(words, namespace)
        if not unknown:
            given.training_script_args = read_arguments(
                words
            ).script_args  # argparse takes a `--` out of them
        return given, unknown


def _add(group: Any, chosen: Option, short: str | None) -> None:
    spelled = [*([short] if short else []), f"--{chosen.flag}"]
    said: dict[str, Any] = {"dest": chosen.name, "default": None, "help": chosen.help.replace("%", "%%")}
    if chosen.is_bool:
        group.add_argument(*spelled, nargs="?", const="true", metavar="true|false", **said)
    else:
        group.add_argument(*spelled, **said)
