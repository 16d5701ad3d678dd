"""The front door of the command line: a table of commands, of which one is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = {  # word -> (module beside this one, what it does)
    "launch": ("launch", "start a script on this machine's processes, or on several machines"),
    "config": ("config", "write a configuration file with default answers"),
    "env": ("env", "show versions, devices and configuration, for a report"),
    "checkpoints": ("checkpoints", "show which checkpoints lie in a folder, and which are whole"),
    "merge": ("merge", "merge the weights that FSDP has written in shards into one file"),
    "to-fsdp2": ("to_fsdp2", "convert a configuration file of FSDP version 1 to version 2"),
    "test": ("check", "start a small script that checks that processes work together and train"),
}
HELP = """\
usage: acc <command> [options]

{commands}

`acc <command> --help` shows the options of one command; `acc --version` the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `acc` with `argv` (the process's own by default); returns the exit code, 2 when the command is unknown."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        listed = "\n".join(f"  {name:11} {text}" for name, (_, text) in COMMANDS.items())
        print(HELP.format(commands=listed), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from acc_trainer.__about__ import __version__  # noqa: PLC0415  a lazy start is the point

        print(f"acc-trainer {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"acc: {_unknown(words[0])}", file=sys.stderr)
        return 2
    from importlib import import_module  # noqa: PLC0415  a lazy start is the point

    command = import_module(f"acc_trainer.cli.{COMMANDS[words[0]][0]}")
    code: int = command.main(words[1:])
    return code


def _unknown(word: str) -> str:
    import difflib  # noqa: PLC0415  a lazy start is the point

    near = difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `acc {near[0]}`?" if near else f"there are: {', '.join(COMMANDS)}"
    return f"no command {word!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
