"""One option value as text (environment, command line) or as plain data (YAML), and back.

[Note: how a value is spelled] booleans are `true`/`false` (read: y/yes/t/true/on/1 and n/no/f/false/off/0), an enum is its value (read:
value or member name, any case), a list is its items with commas (or a JSON list when an item has a comma of its own), a dict is
JSON, None is `none`. Whatever `text_of` writes, `value_from` reads back as an equal value, or `text_of` refuses.
"""

from __future__ import annotations

import enum
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


def truth_of(text: str) -> bool:
    """The boolean a word stands for; ValueError for any other word."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"expected true or false (or yes/no, on/off, 1/0), got {text!r}")


def split_optional(kind: Any) -> tuple[Any, bool]:
    """(X, True) for `X | None`, (kind, False) otherwise. A union of several types stays as it is."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind, False
    members = typing.get_args(kind)
    others = tuple(member for member in members if member is not type(None))
    if len(others) == len(members):
        return kind, False
    return (others[0] if len(others) == 1 else typing.Union[others]), True  # noqa: UP007  built from a tuple


def value_from(raw: Any, kind: Any) -> Any:
    """`raw` (text, or plain data from a file) as a value of type `kind`; ValueError saying what was expected."""
    kind, optional = split_optional(kind)
    if raw is None or (optional and isinstance(raw, str) and raw.strip().lower() == "none"):
        if optional or kind in (Any, object):
            return None
        raise ValueError(f"expected {kind_name(kind)}, got None")
    return _reader(kind)(raw, kind)


def text_of(value: Any) -> str:
    """`value` as the text that `value_from` reads back."""
    plain = plain_of(value)
    if plain is None:
        return "none"
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, dict):
        return str(_json().dumps(plain))
    if isinstance(plain, list):
        items = [text_of(item) for item in plain]
        ambiguous = items == [""] or any("," in item or item != item.strip() for item in items)
        if ambiguous or (items and items[0].startswith("[")):
            return str(_json().dumps(plain))
        return ",".join(items)
    return repr(plain) if isinstance(plain, float) else str(plain)


def plain_of(value: Any) -> Any:
    """`value` as what a YAML file can hold: enums by value, paths as text, tuples and sets as lists."""
    if isinstance(value, enum.Enum):
        return plain_of(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_of(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain_of(item) for item in value)
    return str(value)


def kind_name(kind: Any) -> str:
    """What to call a type in an error or in the docs: `int`, `list[str]`, `fp16 | bf16`."""
    kind, optional = split_optional(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        name = "one of " + ", ".join(str(member.value) for member in kind)
    elif typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        name = ("one of " if len(choices) > 1 else "") + ", ".join(str(choice) for choice in choices)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        name = " or ".join(kind_name(member) for member in typing.get_args(kind))
    elif isinstance(kind, type) and not typing.get_args(kind):
        name = kind.__name__
    else:
        name = str(kind).replace("typing.", "")
    return f"{name} or none" if optional else name


def keeps_empty_text(kind: Any) -> bool:
    """Whether empty text is a value of this type (a string, a list) and not just an unset variable."""
    kind, _ = split_optional(kind)
    return kind is str or typing.get_origin(kind) in (list, tuple) or kind in (list, tuple)


def _reader(kind: Any) -> Callable[[Any, Any], Any]:
    """The function that reads values of `kind`."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return _read_literal
    if origin in (typing.Union, types.UnionType):
        return _read_union
    base = origin or kind
    if base in _READERS:
        return _READERS[base]
    if isinstance(base, type):
        if issubclass(base, enum.Enum):
            return _read_enum
        if issubclass(base, os.PathLike):
            return _read_path
    return _read_as_is


def _read_bool(raw: Any, _kind: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) or (isinstance(raw, int) and raw in (0, 1)):
        return truth_of(str(raw))
    raise ValueError(f"expected true or false, got {raw!r}")


def _read_int(raw: Any, _kind: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        try:
            return int(raw.strip())
        except ValueError:
            pass
    raise ValueError(f"expected a whole number, got {raw!r}")


def _read_float(raw: Any, _kind: Any) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, str):
        try:
            return float(raw.strip())
        except ValueError:
            pass
    raise ValueError(f"expected a number, got {raw!r}")


def _read_str(raw: Any, _kind: Any) -> str:
    if isinstance(raw, str) and not isinstance(raw, enum.Enum):
        return raw
    if isinstance(raw, enum.Enum):
        return str(raw.value)
    if isinstance(raw, os.PathLike):
        return str(os.fspath(raw))
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError(f"expected text, got {raw!r} (quote it if it comes from a YAML file)")


def _read_enum(raw: Any, kind: type[enum.Enum]) -> enum.Enum:
    if isinstance(raw, kind):
        return raw
    for text in _spellings(raw.value if isinstance(raw, enum.Enum) else raw):
        for member in kind:
            if text in (str(member.value).lower(), member.name.lower()):
                return member
    raise ValueError(f"expected {kind_name(kind)}, got {raw!r}")


def _read_literal(raw: Any, kind: Any) -> Any:
    choices = typing.get_args(kind)
    for choice in choices:
        if type(raw) is type(choice) and raw == choice:
            return choice
    for text in _spellings(raw):
        for choice in choices:
            if text == text_of(choice).lower():
                return choice
    raise ValueError(f"expected {kind_name(kind)}, got {raw!r}")


def _read_union(raw: Any, kind: Any) -> Any:
    members = typing.get_args(kind)
    if not isinstance(raw, str):
        for member in members:
            if isinstance(member, type) and type(raw) is member:
                return raw
    # text fits nearly everywhere, so str is asked last
    for member in sorted(members, key=lambda member: member is str):
        try:
            return value_from(raw, member)
        except ValueError:
            continue
    raise ValueError(f"expected {kind_name(kind)}, got {raw!r}")


def _read_items(raw: Any, kind: Any) -> Any:
    container = typing.get_origin(kind) or kind
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    item_kind = arguments[0] if arguments else str
    if isinstance(raw, str):
        raw = _split(raw)
    if not isinstance(raw, Sequence):
        raw = [raw] if isinstance(raw, (int, float, enum.Enum)) and not isinstance(raw, bool) else raw
        if not isinstance(raw, (list, set, frozenset)):
            raise ValueError(f"expected a list, got {raw!r}")
    return container(value_from(item, item_kind) for item in raw)


def _read_dict(raw: Any, _kind: Any) -> dict[Any, Any]:
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, str):
        try:
            value = _json().loads(raw)
        except ValueError as error:
            raise ValueError(f"expected a JSON object, got {raw!r} ({error})") from None
        if isinstance(value, dict):
            return value
    raise ValueError(f"expected a JSON object, got {raw!r}")


def _read_path(raw: Any, kind: Any) -> Any:
    if isinstance(raw, (str, os.PathLike)):
        return kind(os.fspath(raw))
    raise ValueError(f"expected a path, got {raw!r}")


def _read_as_is(raw: Any, _kind: Any) -> Any:
    return raw


_READERS: dict[Any, Callable[[Any, Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    list: _read_items,
    tuple: _read_items,
    dict: _read_dict,
    Mapping: _read_dict,
}


def _spellings(raw: Any) -> list[str]:
    """Lower-case words a choice may be recognised by; YAML turns a bare `no` into False, so booleans have several."""
    if isinstance(raw, bool):
        return ["yes", "true", "on"] if raw else ["no", "false", "off"]
    return [str(raw).strip().lower()]


def _split(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            items = _json().loads(text)
        except ValueError as error:
            raise ValueError(f"expected items with commas or a JSON list, got {text!r} ({error})") from None
        return list(items)
    return [item.strip() for item in text.split(",")] if text.strip() else []


def _json() -> Any:
    import json  # noqa: PLC0415  a lazy start is the point

    return json
