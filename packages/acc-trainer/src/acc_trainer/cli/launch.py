"""`acc launch`: options over configuration file over defaults, a plan, and the plan carried out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from acc_ops.options import Option, options_of
from acc_trainer.launch.arguments import Arguments, read_arguments
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.options import SECTIONS, SHORT, LaunchOptions

USAGE = "usage: acc launch [options] script [arguments of the script]"


def main(argv: Sequence[str] | None = None, command: str = "acc launch") -> int:
    """Launch as `argv` says (the process's own arguments by default); the exit code is the first failing worker's.

    `command` is what the user typed, for messages.

    2 when what is asked for cannot be started, with one line on stderr that says why. With a single process this
    process becomes the script and the function does not return.
    """
    try:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help:
            print(help_text(), end="")
            return 0
        return _launch(arguments, command)
    except LaunchError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2


def _launch(arguments: Arguments, command: str) -> int:
    from acc_trainer.launch.plan import make_plan  # noqa: PLC0415  --help and errors are answered without these
    from acc_trainer.launch.worker import inherited  # noqa: PLC0415

    environ = inherited()
    plan = make_plan(arguments, environ)
    if plan.options.dry_run:
        print(plan)
        return 0
    if not plan.options.quiet:
        for note in plan.notes:
            print(f"{command}: {note}", file=sys.stderr, flush=True)
    from acc_trainer.launch.run import run_plan  # noqa: PLC0415

    return run_plan(plan, environ, command=command)


def help_text() -> str:
    """Every option, in sections."""
    options = {chosen.name: chosen for chosen in options_of(LaunchOptions)}
    short = {name: spelled for spelled, name in SHORT.items()}
    lines = [
        USAGE,
        "",
        "Options end at the script. `--a-b` and `--a_b` are the same. Flags win over the configuration file.",
    ]
    for title, names in SECTIONS.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _lines_of(options[name], short.get(name))
    return "\n".join(lines) + "\n"


def _lines_of(chosen: Option, short: str | None) -> list[str]:
    flag = chosen.flag or chosen.name
    kind = chosen.kind if isinstance(chosen.kind, type) else str(chosen.kind).partition(" ")[0]
    metavar = {"int": "N", "float": "X"}.get(
        getattr(kind, "__name__", str(kind)), flag.rpartition("_")[2].upper()
    )
    spelled = f"--{flag}" if chosen.is_bool else f"--{flag} {metavar}"
    left = f"  {f'{short}, ' if short else ''}{spelled}"
    text = chosen.help
    if chosen.choices:
        text += f": {', '.join(map(str, chosen.choices))}"
    default = chosen.default_value()
    if default not in (None, False, ""):
        text += f" (default {default})"
    width = 44
    return [f"{left:{width}}{text}"] if len(left) < width else [left, f"{'':{width}}{text}"]


if __name__ == "__main__":
    sys.exit(main())
