"""An option is declared once; its flag, file key, environment variable, help and docs follow from the declaration.

    @dataclass(frozen=True, kw_only=True)
    class Training:
        steps: int = option(1, env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", help="micro-batches per step")

[Note: the order of the layers] argument > file > environment > default. `resolve` takes the layers that the caller hands it and no other;
`sources` tells afterwards which layer each value came from. Imports no torch, and argparse, json and difflib only when used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from acc_ops.option_fields import NOT_GIVEN as NOT_GIVEN
from acc_ops.option_fields import Option as Option
from acc_ops.option_fields import OptionError as OptionError
from acc_ops.option_fields import check_options as check_options
from acc_ops.option_fields import closest as closest
from acc_ops.option_fields import convert as convert
from acc_ops.option_fields import hint
from acc_ops.option_fields import option as option
from acc_ops.option_fields import options_of as options_of
from acc_ops.option_flags import add_flags as add_flags
from acc_ops.option_flags import attach_values as attach_values
from acc_ops.option_text import keeps_empty_text, kind_name, plain_of, text_of

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")
TABLE_COLUMNS = ("option", "flag", "file key", "environment", "type", "default", "meaning")  # of `as_table`
_SOURCES = "_option_sources"  # where an instance holds what `sources` answers


def resolve(
    cls: type[T],
    *,
    given: Mapping[str, Any] | argparse.Namespace | None = None,
    file: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | bool | None = None,
) -> T:
    """An instance from the layers handed in: `given` by field name, over `file` by key, over `environ`, over the defaults.

    A layer that is None takes no part; `environ=True` is this process's environment. Entries of `given` equal to NOT_GIVEN count as absent, and
    attributes of a Namespace that are no option of `cls` are skipped. Raises OptionError for a bad value, an unknown name or key, and a
    required option that no layer has.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    variables = _environment(environ if not isinstance(environ, bool) else None) if environ else {}
    for layer, found in (
        ("environment", _values_in_environment(cls, variables)),
        ("file", _values_in_file(cls, file or {})),
        ("argument", _values_given(cls, given)),
    ):
        values.update(found)
        origins.update(dict.fromkeys(found, layer))
    return _build(cls, values, origins, variables)


def from_env(cls: type[T], environ: Mapping[str, str] | None = None, **explicit: Any) -> T:
    """An instance from the environment (this process's unless given); `explicit` values win."""
    return resolve(cls, given=explicit, environ=True if environ is None else environ or None)


def from_mapping(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """An instance from the keys of a file; OptionError for an unknown key, naming the closest known one."""
    return resolve(cls, file=mapping)


def fill_from_env(instance: Any, environ: Mapping[str, str] | None = None) -> None:
    """Set the options of `instance` that are still None from the environment: for `__post_init__` of classes whose None means "ask there"."""
    # asked now: what is None was not given, whatever default the class puts there later
    origins = sources(instance)
    found = _values_in_environment(type(instance), _environment(environ))
    missing = {name: value for name, value in found.items() if getattr(instance, name) is None}
    for name, value in missing.items():
        object.__setattr__(instance, name, value)
    _remember(instance, {**origins, **dict.fromkeys(missing, "environment")})


def to_env(instance: Any) -> dict[str, str]:
    """The variables that make `from_env` build an equal instance. Writes nothing.

    An option that is None, as its default is, has no variable: a caller that starts a process removes those it may inherit. Raises
    OptionError for a value that its variable could not give back.
    """
    variables = {}
    for chosen in options_of(type(instance)):
        if chosen.env is None:
            continue
        value = chosen.shown(getattr(instance, chosen.name))
        if value is None and chosen.default_value() is None:
            continue
        text = text_of(value)
        back = _read_variable(chosen, text)
        if back is NOT_GIVEN and value == chosen.default_value():
            continue
        if "\0" in text or (back != value and value == value):
            raise OptionError(
                f"{type(instance).__name__}.{chosen.name}={value!r} cannot be handed on in {chosen.env}: "
                f"the text {text!r} would be read as {back!r}"
            )
        variables[chosen.env] = text
    return variables


def to_mapping(instance: Any) -> dict[str, Any]:
    """The options as plain data by key, ready for a YAML or JSON file; `from_mapping` reads it back."""
    return {
        chosen.key: plain_of(chosen.shown(getattr(instance, chosen.name)))
        for chosen in options_of(type(instance))
        if chosen.key is not None
    }


def sources(instance: Any) -> dict[str, str]:
    """Where each option's value came from: "argument", "file", "environment" or "default".

    For an instance built by its constructor: "argument" where the value is not the default.
    """
    kept = getattr(instance, _SOURCES, None)
    if kept is not None:
        return dict(kept)
    return {
        chosen.name: "default" if getattr(instance, chosen.name) == chosen.default_value() else "argument"
        for chosen in options_of(type(instance))
    }


def note_source(instance: Any, name: str, origin: str) -> None:
    """Let `sources` answer `origin` for one option: for a class that takes values from a file of its own."""
    _remember(instance, {**sources(instance), name: origin})


def as_table(cls: type, columns: Sequence[str] = TABLE_COLUMNS) -> str:
    """A Markdown table of the options for the docs: a row per option, with the `columns` asked for, of TABLE_COLUMNS."""
    unknown = sorted(set(columns) - set(TABLE_COLUMNS))
    if unknown:
        raise OptionError(f"unknown column {unknown[0]!r}: choose of {', '.join(TABLE_COLUMNS)}")
    rows = [tuple(columns), ("---",) * len(columns)]
    for chosen in options_of(cls):
        kind = kind_name(chosen.kind)
        if chosen.choices is not None:
            kind = ", ".join(text_of(choice) for choice in chosen.choices)
        cells = {
            "option": _code(chosen.name),
            "flag": _code(None if chosen.flag is None else f"--{chosen.flag}"),
            "file key": _code(chosen.key),
            "environment": _code(chosen.env),
            "type": kind,
            "default": "required" if chosen.required else _code(text_of(chosen.default_value())),
            "meaning": chosen.help,
        }
        rows.append(tuple(cells[column] for column in columns))
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
    )


@contextmanager
def environment_is(environ: Mapping[str, str]) -> Iterator[None]:
    """Inside the block options read `environ` where they would read the process's environment, in this thread or task only."""
    token = _READ_FROM.set(environ)
    try:
        yield
    finally:
        _READ_FROM.reset(token)


_READ_FROM: ContextVar[Mapping[str, str] | None] = ContextVar("acc_ops_environment", default=None)


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    if environ is not None:
        return environ
    bound = _READ_FROM.get()
    return os.environ if bound is None else bound


def _values_in_environment(cls: type, environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for chosen in options_of(cls):
        text = environ.get(chosen.env) if chosen.env is not None else None
        value = NOT_GIVEN if text is None else _read_variable(chosen, text)
        if value is not NOT_GIVEN:
            found[chosen.name] = value
    return found


def _read_variable(chosen: Option, text: str) -> Any:
    """The value of a variable; NOT_GIVEN when it is empty and empty is no value of the option's type."""
    if text == "" and (chosen.parse is not None or not keeps_empty_text(chosen.kind)):
        return NOT_GIVEN
    return convert(chosen, text, f"environment variable {chosen.env}")


def _values_in_file(cls: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    by_key = {chosen.key: chosen for chosen in options_of(cls) if chosen.key is not None}
    found = {}
    for key, raw in mapping.items():
        if key not in by_key:
            raise OptionError(f"unknown key {key!r}{hint(str(key), by_key)}")
        found[by_key[key].name] = convert(by_key[key], raw, f"key {key}")
    return found


def _values_given(cls: type, given: Mapping[str, Any] | argparse.Namespace | None) -> dict[str, Any]:
    by_name = {chosen.name: chosen for chosen in options_of(cls)}
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    found = {}
    entries = given if isinstance(given, Mapping) else vars(given) if given is not None else {}
    for name, raw in entries.items():
        if raw is NOT_GIVEN:
            continue
        if name in by_name:
            # a parser has already applied `parse`, and it need not bear a second time
            ready = by_name[name].parse is not None and not isinstance(given, Mapping)
            found[name] = raw if ready else convert(by_name[name], raw)
        elif name in known:
            found[name] = raw
        elif isinstance(given, Mapping):
            raise OptionError(f"{cls.__name__} has no option {name!r}{hint(name, known)}")
    return found


def _build(cls: type[T], values: dict[str, Any], origins: dict[str, str], variables: Mapping[str, str]) -> T:
    for chosen in options_of(cls):
        if chosen.required and chosen.name not in values:
            ways = [f"--{chosen.flag}" if chosen.flag else None, chosen.env]
            raise OptionError(
                f"{chosen.name} must be given: {' or '.join(way for way in ways if way) or chosen.name}"
            )
    with environment_is(
        variables
    ):  # for a __post_init__ that fills from the environment: it is a layer like the others
        instance = cls(**values)
    filled = getattr(instance, _SOURCES, {})
    # what the class itself found is later than what was handed to it
    kept = {name: origin for name, origin in filled.items() if origin in ("environment", "file")}
    _remember(instance, {c.name: kept.get(c.name, origins.get(c.name, "default")) for c in options_of(cls)})
    return instance


def _remember(instance: Any, origins: dict[str, str]) -> None:
    if hasattr(
        instance, "__dict__"
    ):  # a class with slots has no room: `sources` then compares with the defaults
        object.__setattr__(instance, _SOURCES, origins)


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""
