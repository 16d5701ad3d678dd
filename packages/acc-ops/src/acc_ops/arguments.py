"""Checks of arguments that several functions take."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(number: Any, name: str) -> int:
    """`number` as an int. Raises TypeError for what is none: a float, a text, None."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r:.60}") from None


def at_least_0(number: Any, name: str) -> int:
    """`number` as an int. Raises TypeError as `whole_number`, and ValueError for one below 0."""
    counted = whole_number(number, name)
    if counted < 0:
        raise ValueError(f"{name} must be at least 0, got {counted}")
    return counted
