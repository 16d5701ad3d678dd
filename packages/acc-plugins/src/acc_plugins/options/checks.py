"""What every option class does when it is built: give each value its declared type, or say what is wrong with it."""

from __future__ import annotations

from typing import Any

from acc_ops.options import OptionError, convert, options_of


def settle(instance: Any) -> None:
    """Convert every option of `instance` to its declared type: enum members from their text, paths to text, numbers checked.

    Raises OptionError naming class and option. A value of None stays where None is the default.
    """
    for declared in options_of(type(instance)):
        value = getattr(instance, declared.name)
        if value is None and declared.default is None:
            continue
        converted = convert(declared, value, f"{type(instance).__name__}.{declared.name}")
        if converted is not value:
            setattr(instance, declared.name, converted)


def require_at_least(instance: Any, name: str, smallest: float) -> None:
    """Raise OptionError unless the option is None or at least `smallest`."""
    value = getattr(instance, name)
    if value is not None and not value >= smallest:
        raise OptionError(f"{type(instance).__name__}.{name} must be at least {smallest}, got {value}")
