"""Calls that torch.compile must not look into: fetching weights breaks the graph, there and nowhere else.

`torch.compiler.disable` imports dynamo, which takes most of a second; it is used only once somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")

# True while torch.export traces, strictly or not; older versions of torch do not tell
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)

_disabled: Callable[..., Any] | None = None  # `_call` as dynamo leaves it alone; made when dynamo is there


def untraced(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """`function(*args, **kwargs)`, never as a part of a compiled graph."""
    global _disabled
    if _disabled is None:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        _disabled = torch.compiler.disable(_call)
    return _disabled(function, *args, **kwargs)


def _call(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    return function(*args, **kwargs)
