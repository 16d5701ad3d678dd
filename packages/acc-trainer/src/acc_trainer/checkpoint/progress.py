"""Where one rank stands: what a resumed run needs beside weights and states, as plain numbers and tensors.

[Note: what is whose] Positions of loaders, the accumulation window and the counters of optimizers and schedules are kept by each rank for itself.
Another number of ranks takes rank 0's: the half window is left out, and each loader deals the rest of its epoch out anew (`data/dealing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .contents import Contents, Run
from .gradients import LOST, window_is_open

Progress = dict[str, Any]


def progress_of(run: Run, contents: Contents) -> Progress:
    """What this rank saves. Call it on every rank, between two steps."""
    trackers = getattr(run, "_trackers", None)
    return {
        "step": run.step,
        "grad_sync": run.grad_sync.state_dict(),
        "positions": [_state_of(getattr(item.thing, "position", None)) for item in contents.loaders],
        "optimizers": [_call(item.thing, "_progress") for item in contents.optimizers],
        "schedulers": [_call(item.thing, "_progress") for item in contents.schedulers],
        "exchange": {item.name: run.strategy.exchange_order(item.thing) for item in contents.models},
        "trackers": None if trackers is None else trackers.state_dict(),
    }


def of_other_ranks(progress: Mapping[str, Any]) -> tuple[Progress, list[str]]:
    """Rank 0's progress as it means something to another number of ranks, and what is lost of it."""
    window = progress.get("grad_sync", {})
    return {**without_window(progress), "exchange": {}}, [LOST] if window_is_open(window) else []


def without_window(progress: Mapping[str, Any]) -> Progress:
    """The same with its accumulation window closed: the next micro-batch begins one."""
    window = progress.get("grad_sync", {})
    if not window_is_open(window):
        return dict(progress)
    return {**progress, "grad_sync": {**window, "index": 0, "sync": True, "broken": False}}


def hand_out_progress(run: Run, contents: Contents, progress: Mapping[str, Any]) -> list[str]:
    """Give every owner its part; what does not continue as it was, for a warning."""
    unlike = []
    positions = list(progress.get("positions", ()))
    for item in contents.loaders:
        position, state = getattr(item.thing, "position", None), _at(positions, item.place)
        if position is None or state is None:
            continue
        position.load_state_dict(state)
        why = getattr(position, "not_dealt", None)
        if why is not None:
            unlike.append(f"the samples of {item.name}, which begins its epoch anew ({why})")
    for kind in ("optimizers", "schedulers"):
        for item in getattr(contents, kind):
            state = _at(list(progress.get(kind, ())), item.place)
            if state is not None and hasattr(item.thing, "_take_progress"):
                item.thing._take_progress(state)
    orders = progress.get("exchange", {})
    for item in contents.models:
        kept = item.name in orders and not run.strategy.restore_exchange_order(item.thing, orders[item.name])
        if kept and run.world.size > 2:  # a sum of two is the same in any order
            unlike.append(
                f"the order in which gradients of {item.name} are added up over the ranks: last digits differ"
            )
    trackers = getattr(run, "_trackers", None)
    if trackers is not None and progress.get("trackers"):
        trackers.load_state_dict(progress["trackers"])
    return unlike


def _at(states: Sequence[Any], place: int) -> Any:
    return states[place] if place < len(states) else None


def _state_of(thing: Any) -> Any:
    return None if thing is None else thing.state_dict()


def _call(thing: Any, method: str) -> Any:
    return getattr(thing, method)() if hasattr(thing, method) else None
