"""Warnings that name the line of the script, however deep inside these packages they are given."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OURS = frozenset({"acc_ops", "acc_hooks", "acc_bigmodel", "acc_plugins", "acc_trainer", "acc_compat"})
_BETWEEN = frozenset(
    {"contextlib", "functools", "torch.utils._contextlib"}
)  # what decorators put between two of our frames


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` for the first line outside our packages that led here; for the outermost one where all are ours."""
    frame = outside_caller(sys._getframe(1))
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def outside_caller(frame: FrameType) -> FrameType:
    """The first frame from `frame` outwards that is not of our packages, else the outermost."""
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def _is_ours(module: str) -> bool:
    return module in _BETWEEN or module.partition(".")[0] in _OURS
