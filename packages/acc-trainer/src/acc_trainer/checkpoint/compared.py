"""What each rank knows for itself, compared between them: their steps before a save, and what they read before a load hands anything out.

[Note: ranks that are at different steps] All ranks make as many steps, and then a checkpoint has one. Where a loader gave them unequal numbers of
batches (`even_batches=False`, streams with shards of their own), its position says so (`apart`), and each keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from acc_ops.exchange import tried
from acc_ops.world import World

from .layout import CheckpointError, ReplacedError
from .listing import CheckpointInfo
from .pending import Pending
from .replaced import is_replaced


def agreed_progress(world: World, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Where this rank stands, as `make` tells it, to be saved.

    CheckpointError on all ranks unless they are at the same step. What `make` raises is raised there, and as CheckpointError elsewhere.
    """
    made, error = tried(make)
    progress = made or {}
    failed = None if error is None else f"{type(error).__name__}: {error}"
    said = world.comm.all_gather_object((failed, progress.get("step"), _went_apart(progress)))
    if error is not None:
        raise error
    for rank, (why, _, _) in enumerate(said):
        if why is not None:
            raise CheckpointError(f"rank {rank} cannot tell where it stands: {why}")
    if not any(apart for _, _, apart in said):
        _check_equal(
            [step for _, step, _ in said],
            "cannot be saved: call accumulate() on every rank for every batch, or set accelerator.step to one number",
        )
    return progress


def compared(world: World, pending: Pending, taken: CheckpointInfo) -> Pending:
    """What this rank read, and what every other rank misses.

    CheckpointError on all ranks where their steps are not those of one checkpoint; ReplacedError when another save took its place meanwhile.
    """
    apart = _went_apart(pending.progress)
    said = world.comm.all_gather_object((pending.step, apart, pending.missing))
    steps = [step for step, _, _ in said]
    known = [step for step in steps if step is not None]
    try:
        if taken.manifest is not None:
            ours = steps[:1] if any(apart for _, apart, _ in said) else steps
            _check_equal(
                [taken.manifest.step, *ours], f"read from {taken.path}, are not of one save", "manifest"
            )
    except CheckpointError as error:
        if any(world.comm.all_gather_object(is_replaced(taken))):
            raise ReplacedError(f"{taken.path} was replaced by another save while it was read") from error
        raise
    step = pending.step if pending.step is not None or not known else known[0]
    missing = list(dict.fromkeys(one for _, _, ones in said for one in ones))
    return replace(pending, step=step, missing=missing)


def _went_apart(progress: Mapping[str, Any]) -> bool:
    return any(bool(state and state.get("apart")) for state in progress.get("positions", ()))


def _check_equal(steps: Sequence[int | None], why: str, *before: str) -> None:
    """CheckpointError unless all are the same; the first ones are those of `before`, the others of the ranks."""
    if len(set(steps)) > 1:
        names = [*before, *(f"rank {rank}" for rank in range(len(steps) - len(before)))]
        told = ", ".join(f"{name} has {step}" for name, step in zip(names, steps, strict=True))
        raise CheckpointError(f"the ranks are at different steps ({told}) that {why}")
