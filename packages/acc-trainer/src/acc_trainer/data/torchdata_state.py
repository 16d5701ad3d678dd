"""What a state of torchdata's StatefulDataLoader tells, and which one such a loader goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acc_ops.optional import require


def batches_in(state: Mapping[str, Any]) -> int:
    """The batches that a stateful loader had read of its pass in this state of its own, which has one form with workers and one without."""
    if state.get("_iterator_finished"):
        return 0
    snapshot = state.get("_snapshot", {})
    steps = state.get("_num_yielded", snapshot.get("_snapshot_step", 0))
    return int(steps) + int(state.get("_steps_since_snapshot", 0))


def has_no_state(state: Mapping[str, Any]) -> bool:
    """Whether the stream in this state of a stateful loader, or its iterator, told none of its own."""
    if not state:
        return False
    workers = state.get("_snapshot", {}).get("_worker_snapshots", {}).values()
    return all(
        one.get("dataset_state") is None
        and (one.get("fetcher_state") or {}).get("dataset_iter_state") is None
        for one in (workers or [state])
    )


def is_fresh(state: Mapping[str, Any]) -> bool:
    """Whether nothing was read in this state of a stateful loader, and nothing in it has a state of its own."""
    main = state.get("_snapshot", {}).get("_main_snapshot", state)
    return has_no_state(state) and not batches_in(state) and main.get("_index_sampler_state") is None


def given_state(loader: Any) -> dict[str, Any] | None:
    """The state that a stateful loader was given, from which its next pass goes on; None where that begins anew."""
    if not was_asked(loader):
        return getattr(loader, "next_iter_state", None)
    state: dict[str, Any] = loader._iterator.state_dict()  # has taken what was given
    return state if batches_in(state) else None


def was_asked(loader: Any) -> bool:
    """Whether a stateful loader has opened an iterator only because somebody asked for its state; its next pass would take that one."""
    return bool(getattr(loader, "_initial_iter_for_state_dict", False))


def stateful_loader_class() -> Any:
    """torchdata's `StatefulDataLoader`; `ImportError` without torchdata >= 0.8."""
    require("torchdata", "a stateful data loader (use_stateful_dataloader=True)")
    module = require("torchdata.stateful_dataloader", "a stateful data loader (torchdata 0.8 or newer)")
    return module.StatefulDataLoader
