"""argparse for commands that programs parse themselves: `--a-b` is `--a_b`, and the namespace tells what was said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any


def _recording(action: argparse.Action) -> argparse.Action:
    """`action`, which from now on adds its name to the namespace's set `nondefault` when it is used."""
    kind: Any = type(action)

    class Recording(kind):
        def __call__(
            self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
        ) -> None:
            super().__call__(parser, namespace, values, option_string)
            if not hasattr(namespace, "nondefault"):
                namespace.nondefault = set()
            namespace.nondefault.add(self.dest)

    action.__class__ = Recording
    return action


class _BothSpellings(argparse._ActionsContainer):
    """Options are known with dashes and with underscores."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As argparse's; a further spelling of each long option is added behind those given."""
        spelled = list(args)
        for name in args:
            if isinstance(name, str) and name.startswith("--"):
                words = name[2:]
                spelled += [f"--{words.replace('-', '_')}", f"--{words.replace('_', '-')}"]
        return _recording(super().add_argument(*dict.fromkeys(spelled), **kwargs))


class CustomArgumentGroup(_BothSpellings, argparse._ArgumentGroup):
    """A group of options of a `CustomArgumentParser`."""


class CustomArgumentParser(_BothSpellings, argparse.ArgumentParser):
    """argparse's parser, in which `--a-b` and `--a_b` are the same; the namespace has the names of what was said in `nondefault`."""

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """A group whose options behave like the parser's."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


def parser_for(
    subparsers: Any,
    name: str,
    description: str,
    func: Any,
    kind: type[CustomArgumentParser] = CustomArgumentParser,
) -> argparse.ArgumentParser:
    """A parser of its own (`acc NAME`), or with `subparsers` one more command `name` of theirs, whose namespace has `func`."""
    if subparsers is None:
        return kind(prog=f"acc {name}", description=description)
    before, subparsers._parser_class = subparsers._parser_class, kind
    try:
        parser: argparse.ArgumentParser = subparsers.add_parser(
            name, description=description, help=description
        )
    finally:
        subparsers._parser_class = before
    parser.set_defaults(func=func)
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], None],
    *errors: type[Exception],
) -> int:
    """Parse `argv` (None: the process's arguments) and run; exit code 1, and its text on stderr, for one of `errors`, 2 for wrong arguments."""
    try:
        args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    try:
        command(args)
    except errors as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0
