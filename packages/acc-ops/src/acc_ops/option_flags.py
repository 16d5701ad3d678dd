"""Command-line flags of an options class, for argparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from acc_ops.option_fields import NOT_GIVEN, Option, OptionError, convert, options_of
from acc_ops.option_text import FALSE_WORDS, TRUE_WORDS, kind_name, text_of

if TYPE_CHECKING:
    import argparse


def add_flags(parser: argparse.ArgumentParser, cls: type, *, title: str | None = None) -> None:
    """Give `parser` one flag per option of `cls`, spelled with dashes and with underscores.

    The default of each is NOT_GIVEN, so that `resolve(cls, given=namespace, ...)` knows what was left out. A boolean takes `--x`, `--x true`,
    `--x=false`; where a positional may follow a bare `--x`, hand the parser `attach_values(argv, cls)`.
    """
    group = parser.add_argument_group(title) if title else parser
    for chosen in options_of(cls):
        if chosen.flag is None:
            continue
        spellings = dict.fromkeys((f"--{chosen.flag.replace('_', '-')}", f"--{chosen.flag}"))
        extra: dict[str, Any] = {"nargs": "?", "const": True} if chosen.is_bool else {}
        group.add_argument(
            *spellings,
            dest=chosen.name,
            type=_reader(chosen),
            default=NOT_GIVEN,
            metavar=_metavar(chosen),
            help=_help(chosen),
            **extra,
        )


def attach_values(
    argv: Sequence[str], *classes: type, short: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """`argv` with every boolean flag's value joined to it (`--cpu train.py` -> `--cpu=true train.py`); `short`: `-q` -> the flag it stands for.

    Without it argparse would take the script for the value of `--cpu`. Ends at the first positional or `--`: what follows is not ours.
    """
    flags = {chosen.flag: chosen for cls in classes for chosen in options_of(cls) if chosen.flag is not None}
    joined: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        word = f"--{short[word]}" if word in short else word
        chosen = flags.get(word[2:].replace("-", "_")) if word.startswith("--") else None
        if chosen is None:
            joined.append(word)
        elif chosen.is_bool:
            value = rest.pop(0) if rest and rest[0].lower() in TRUE_WORDS | FALSE_WORDS else "true"
            joined.append(f"{word}={value}")
        else:
            joined.append(word)
            if rest:
                joined.append(rest.pop(0))
    return joined + rest


def _reader(chosen: Option) -> Callable[[Any], Any]:
    def read(text: Any) -> Any:
        try:
            return convert(chosen, text)
        except OptionError as error:
            import argparse  # noqa: PLC0415  a lazy start is the point

            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{chosen.name}: ")) from None

    return read


def _metavar(chosen: Option) -> str:
    if chosen.is_bool:
        return "true|false"
    if chosen.choices is not None:
        return "|".join(text_of(choice) for choice in chosen.choices)
    return chosen.name.rsplit("_", 1)[-1].upper()


def _help(chosen: Option) -> str:
    about = [] if chosen.choices is not None or chosen.is_bool else [kind_name(chosen.kind)]
    if not chosen.required:
        about.append(f"default: {text_of(chosen.default_value())}")
    if chosen.env is not None:
        about.append(chosen.env)
    return f"{chosen.help} ({'; '.join(about)})".replace("%", "%%").strip()
