"""Settings and values in the forms that trackers can store: plain ones, numbers, and one level of names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_DEEPEST = 16  # further down a structure is shown as text: it may contain itself
_MOST_ELEMENTS = 64  # a longer tensor is shown as text


def number_of(value: Any) -> Any:
    """A tensor or array of one element as a Python number; anything else as it is."""
    if isinstance(value, (int, float, str)):
        return value
    if callable(getattr(value, "item", None)) and _elements(value) == 1:
        return value.item()
    return value


def spread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a step as one level of names: a dict `{"loss": {"a": 1}}` becomes `loss/a`; tensors of one element become numbers."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            made.update((f"{key}/{name}", one) for name, one in spread(value).items())
        else:
            made[str(key)] = number_of(value)
    return made


def is_number(value: Any) -> bool:
    """Whether it can be drawn as a curve."""
    return isinstance(value, (int, float))


def plain(value: Any, _depth: int = 0) -> Any:
    """`value` in terms of None, bool, int, float, str, list and dict with text keys.

    Enums become their value, paths their text, dataclasses and mappings dicts, small tensors and arrays numbers or lists of them;
    whatever is left becomes `str(value)`.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return plain(value.value, _depth + 1)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if _depth >= _DEEPEST:
        return str(value)
    if isinstance(value, Mapping):
        return {_key(key): plain(one, _depth + 1) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), _depth + 1) for field in fields(value)}
    if isinstance(value, Set):
        return sorted((plain(one, _depth + 1) for one in value), key=str)
    if isinstance(value, (bool, int, float, str)):  # their subclasses
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview, range)):
        return [plain(one, _depth + 1) for one in value]
    if callable(getattr(value, "tolist", None)) and 0 < _elements(value) <= _MOST_ELEMENTS:
        return plain(value.tolist(), _depth + 1)
    return str(value)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level of names, `optimizer.lr`, with values that are None, numbers or text."""
    made: dict[str, Any] = {}
    _flatten("", plain(values), made)
    return made


def finite(value: Any) -> Any:
    """`plain(value)` as strict JSON allows it: NaN and the infinities as "NaN", "Infinity" and "-Infinity", which `float()` reads back."""
    return _finite(plain(value))


def table_rows(
    columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any
) -> tuple[list[str] | None, list[list[Any]]]:
    """Columns and rows of a table that was given as either.

    Raises `ValueError` when neither rows nor a dataframe is there.
    """
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], [list(row) for row in dataframe.values.tolist()]
    if data is None:
        raise ValueError("log_table needs the rows: give data (and columns), or dataframe")
    return None if columns is None else list(columns), [list(row) for row in data]


def _elements(value: Any) -> int:
    numel = getattr(value, "numel", None)
    if callable(numel):
        return 0 if getattr(value, "is_meta", False) else int(numel())
    return int(getattr(value, "size", 1))


def _key(key: Any) -> str:
    return key if type(key) is str else str(plain(key, _DEEPEST))


def _flatten(prefix: str, value: Any, made: dict[str, Any]) -> None:
    if isinstance(value, dict) and (value or not prefix):
        for key, one in value.items():
            _flatten(f"{prefix}.{key}" if prefix else key, one, made)
    else:
        made[prefix] = str(value) if isinstance(value, (dict, list)) else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value
