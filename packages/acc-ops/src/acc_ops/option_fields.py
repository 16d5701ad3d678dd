"""A dataclass field that knows its flag, file key, environment variable, help and choices: `option`, and the record `Option` of it.

`acc_ops.options` is the front door; it derives parsers, environments, files and docs from what is declared here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from acc_ops.option_text import split_optional, text_of, value_from

_KEY = "acc_ops.option"  # where a field's metadata holds its declaration


class OptionError(ValueError):
    """An option that is unknown, or has a value it cannot have."""


class _NotGiven:
    """The default of every flag, so that "left out" and "given with the default's value" stay different."""

    def __repr__(self) -> str:
        return "<not given>"

    def __bool__(self) -> bool:
        return False


NOT_GIVEN = _NotGiven()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One declared option, as `options_of` lists it."""

    name: str
    kind: Any  # the evaluated annotation
    default: Any  # dataclasses.MISSING when it must be given or comes from a factory
    factory: Callable[[], Any] | None
    env: str | None
    flag: str | None  # without dashes: "num_processes"
    key: str | None
    help: str
    choices: tuple[Any, ...] | None
    parse: Callable[[str], Any] | None
    plain: Callable[[Any], Any] | None = None  # the way back of `parse`: a value as plain data

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING and self.factory is None

    @property
    def is_bool(self) -> bool:
        return split_optional(self.kind)[0] is bool

    def default_value(self) -> Any:
        """The default, built anew when it comes from a factory; `dataclasses.MISSING` for a required option."""
        return self.factory() if self.factory is not None else self.default

    def shown(self, value: Any) -> Any:
        """`value` as it is written outside Python: as it is, or what `plain` makes of it."""
        return value if value is None or self.plain is None else self.plain(value)


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    env: str | None = None,
    flag: str | bool | None = None,
    key: str | bool | None = None,
    help: str = "",
    choices: Iterable[Any] | None = None,
    parse: Callable[[str], Any] | None = None,
    plain: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field that knows how it is spelled outside Python.

    `flag` and `key` are the field's name unless given; False means: none. `env` has no default. `parse` turns text into the value
    where the annotation does not say how; `plain` turns the value back where the class made an object of it. `choices` also accepts an enum
    class. Without `default` and `factory` the option is required. Raises OptionError for a default and a factory together, and for a mutable default.
    """
    if default is not dataclasses.MISSING and factory is not None:
        raise OptionError(f"give a default or a factory, not both (default={default!r})")
    if isinstance(default, (list, dict, set)):
        raise OptionError(f"the default {default!r} would be shared by all instances: use factory=")
    declared = {
        "env": env,
        "flag": flag,
        "key": key,
        "help": help,
        "choices": None if choices is None else tuple(choices),
        "parse": parse,
        "plain": plain,
    }
    metadata = {_KEY: declared}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass in order; fields not declared by `option` are left out. TypeError for other classes."""
    key: Any = cls
    return _options_of(key)


@functools.lru_cache(maxsize=512)
def _options_of(cls: Any) -> tuple[Option, ...]:
    found = []
    for field in dataclasses.fields(cls):
        declared = field.metadata.get(_KEY)
        if declared is None:
            continue
        given = {name: declared[name] for name in ("env", "help", "choices", "parse", "plain")}
        factory = field.default_factory
        found.append(
            Option(
                name=field.name,
                kind=_kind_of(cls, field, declared["parse"]),
                default=field.default,
                factory=None if factory is dataclasses.MISSING else factory,
                flag=_spelling(declared["flag"], field.name),
                key=_spelling(declared["key"], field.name),
                **given,
            )
        )
    return tuple(found)


def convert(chosen: Option, raw: Any, where: str | None = None) -> Any:
    """`raw` (text, plain data or already a value) as a value of the option; OptionError naming `where` it was found."""
    try:
        if chosen.parse is not None:
            value = chosen.parse(raw) if isinstance(raw, str) else raw
        else:
            value = value_from(_unquoted(raw, chosen.choices), chosen.kind)
        _check_choice(chosen, value)
    except ValueError as error:
        raise OptionError(f"{where or chosen.name}: {error}") from None
    return value


def check_options(instance: Any) -> None:
    """OptionError for the first option of `instance` whose value is not among its choices: call it in `__post_init__`."""
    for chosen in options_of(type(instance)):
        try:
            _check_choice(chosen, getattr(instance, chosen.name))
        except ValueError as error:
            raise OptionError(f"{type(instance).__name__}.{chosen.name}: {error}") from None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name` (dashes, underscores and case do not count), or None when none is near."""
    import difflib  # noqa: PLC0415  a lazy start is the point

    plain = {_plain_name(candidate): candidate for candidate in known}
    near = difflib.get_close_matches(_plain_name(name), plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown `name`: the closest known one, or all of them."""
    near = closest(name, known)
    return f": did you mean {near!r}?" if near else f". Known: {', '.join(sorted(known)) or 'none'}"


def _check_choice(chosen: Option, value: Any) -> None:
    if chosen.choices is None or (value is None and split_optional(chosen.kind)[1]):
        return
    for item in value if isinstance(value, (list, tuple)) and value not in chosen.choices else [value]:
        if item not in chosen.choices:
            known = ", ".join(text_of(choice) for choice in chosen.choices)
            near = closest(text_of(item), [text_of(choice) for choice in chosen.choices])
            raise ValueError(
                f"expected one of {known}, got {item!r}" + (f": did you mean {near}?" if near else "")
            )


def _unquoted(raw: Any, choices: Sequence[Any] | None) -> Any:
    """The choice that YAML turned into a boolean (a bare `no`, `off`, `yes`, `on`), or `raw`."""
    if isinstance(raw, bool) and choices is not None and raw not in choices:
        words = ("yes", "on", "true") if raw else ("no", "off", "false")
        return next((word for word in words if word in choices), raw)
    return raw


def _kind_of(cls: type, field: dataclasses.Field[Any], parse: Callable[[str], Any] | None) -> Any:
    """The annotation as an object. Evaluated for options only, so that other fields may name types that exist for type checkers alone."""
    if not isinstance(field.type, str):
        return field.type
    home: Any = next(base for base in cls.__mro__ if field.name in _annotations_of(base))
    try:
        return _evaluated(field.type, home)
    except (NameError, AttributeError, TypeError) as error:
        if parse is not None:
            return object
        raise OptionError(
            f"the type {field.type!r} of {cls.__name__}.{field.name} cannot be evaluated ({error}): "
            "import its names at module level, or give the option a parse="
        ) from None


# a class that inherits options asks again for those of its base: both answers are kept
@functools.lru_cache(maxsize=512)
def _annotations_of(cls: Any) -> dict[str, Any]:
    return inspect.get_annotations(cls)


@functools.lru_cache(maxsize=2048)
def _evaluated(text: str, home: Any) -> Any:
    return eval(text, vars(sys.modules[home.__module__]), dict(vars(home)))


def _spelling(given: str | bool | None, name: str) -> str | None:
    if given is False:
        return None
    return name if given is None or given is True else given.lstrip("-").replace("-", "_")


def _plain_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
