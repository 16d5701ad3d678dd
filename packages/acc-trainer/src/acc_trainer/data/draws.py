"""Where the generators are that reading a batch may draw from: torch's, Python's and NumPy's, kept cheaply and put back exactly.

[Note: kept and saved] `drawn_so_far` is called for every batch of a stream, so it keeps what the libraries hand out. Only `to_save` makes plain
numbers, lists and tensors of it, which torch loads from a file it does not trust. `put_back` takes both.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from acc_ops.random import set_torch_state, torch_state


def drawn_so_far() -> dict[str, Any]:
    """The states of the generators now. NumPy's only where the script has loaded NumPy."""
    states: dict[str, Any] = {"torch": torch_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def to_save(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states as plain numbers, lists and tensors."""
    return {
        name: [part.tolist() if hasattr(part, "tolist") else part for part in state]
        if name == "numpy"
        else state
        for name, state in states.items()
    }


def put_back(states: Mapping[str, Any]) -> None:
    """Let the generators that are in `states` go on from there; the others stay where they are."""
    if "torch" in states:
        set_torch_state(states["torch"])
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))


@contextmanager
def as_then(states: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the generators are where `states` says; afterwards where they are now."""
    now = drawn_so_far()
    put_back(states)
    try:
        yield
    finally:
        put_back(now)
