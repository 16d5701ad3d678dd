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
