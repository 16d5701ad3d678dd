"""The command line of `acc launch` as values: our options up to the script, then everything is the script's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from acc_ops.options import Option, OptionError, closest, options_of

from .errors import LaunchError
from .options import SHORT, LaunchOptions
from .unbuilt import is_switch, refusal, thing_of, turns_on

_BOOLEANS = {"true": "true", "false": "false", "yes": "true", "no": "false"}


class Arguments:
    """What the command line says: option values as text, the script and its arguments, and notes for the user."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.script: str | None = None
        self.script_args: list[str] = []
        self.notes: list[str] = []
        self.help = False


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Read `argv` up to the script. LaunchError for an unknown option (with the closest known one) or a missing value."""
    options = {chosen.flag: chosen for chosen in options_of(LaunchOptions) if chosen.flag}
    found = Arguments()
    words = list(argv)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        if word in ("-h", "--help"):
            found.help = True
            return found
        spelled, equals, attached = word.partition("=")
        name = SHORT.get(spelled) or spelled.lstrip("-").replace("-", "_")
        chosen = options.get(name) if spelled in SHORT or spelled.startswith("--") else None
        if chosen is None and thing_of(name) is None:
            raise LaunchError(_unknown(spelled, options))
        value = attached if equals else _value(chosen, name, spelled, words)
        if chosen is not None:
            found.given[chosen.name] = value
        elif turns_on(name, value):
            raise LaunchError(refusal(name, spelled))
        else:
            found.notes.append(f"{spelled} has no effect: {thing_of(name)} is not built yet")
    if words and words[0] == "--":
        words.pop(0)
    if words:
        found.script, *found.script_args = words
    return found


def _value(chosen: Option | None, name: str, spelled: str, words: list[str]) -> str:
    if chosen.is_bool if chosen is not None else is_switch(name):
        # `--cpu true train.py`; but never the last word, which is the script
        said = _BOOLEANS.get(words[0].lower()) if len(words) > 1 else None
        return words.pop(0) if said else "true"
    if not words:
        raise LaunchError(f"{spelled} needs a value")
    return words.pop(0)


def _unknown(spelled: str, options: Iterable[str]) -> str:
    near = closest(spelled, [f"--{name}" for name in options])
    hint = f"; did you mean {near}?" if near else "; `acc launch --help` lists them"
    return f"unknown option {spelled}{hint}"


def checked(build: Any, *values: Any, **named: Any) -> Any:
    """Call `build`; an OptionError becomes the launcher's own error."""
    try:
        return build(*values, **named)
    except OptionError as error:
        raise LaunchError(str(error)) from None
