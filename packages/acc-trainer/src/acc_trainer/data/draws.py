"""Where the generators are that reading a batch may draw from: torch's, Python's and NumPy's, kept cheaply and put back exactly.

[Note: kept and saved] `drawn_so_far` is called for every batch of a stream, so it keeps what the libraries hand out. Only `to_save` makes plain
numbers, lists and tensors of it, which torch loads from a file it does not trust. `put_back` takes both. NumPy takes 70 us to hand out its state, so
its memory is looked at first: the last state is kept where nothing was drawn since.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from acc_ops.random import set_torch_state, torch_state


def drawn_so_far(before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The states of the generators now; `before` are those of an earlier call, if there was one. NumPy's only where the script has loaded NumPy."""
    states: dict[str, Any] = {"torch": torch_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        last = before.get("numpy") if before is not None else None
        states["numpy"] = last if _has_not_drawn(numpy, last) else numpy.random.get_state()
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


def _has_not_drawn(numpy: Any, last: Any) -> bool:
    """Whether NumPy's generator is surely where it was in its state `last`; False where that cannot be seen.

    A Mersenne Twister's memory is 624 numbers of 4 bytes and its place in them. A normal number that was drawn ahead lies elsewhere.
    """
    find = getattr(numpy.random, "get_bit_generator", None)
    if find is None or not isinstance(last, tuple):
        return False
    generator = find()
    if type(generator).__name__ != last[0] or last[0] != "MT19937":
        return False
    _, numbers, place, has_normal, _ = last
    if has_normal:
        return False
    memory = numbers.tobytes() + int(place).to_bytes(4, sys.byteorder)
    return ctypes.string_at(generator.ctypes.state_address, len(memory)) == memory
