"""What fails on one rank fails on all: nobody waits for a rank that has left."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from acc_ops.world import World

from .layout import CheckpointError, ReplacedError
from .meeting import leave_block


@contextmanager
def together(world: World, doing: str) -> Iterator[None]:
    """All ranks run the block and leave it together; a failure on one raises there as it is, elsewhere as CheckpointError (ReplacedError as itself).

    The block may speak to other ranks. Where a rank fails while others wait for it inside, its error is shown at once,
    and raised after a minute at most, which ends their waiting.
    """
    try:
        yield
    except BaseException as error:
        _tell(world, doing, error)
        raise
    if not leave_block(world):
        raise CheckpointError(
            f"another rank failed while {doing}, and could wait no longer; its output says why"
        )
    said: list[tuple[str, bool] | None] = world.comm.all_gather_object(None)
    for rank, told in enumerate(said):
        if told is not None:
            text, is_replaced = told
            kind = ReplacedError if is_replaced else CheckpointError
            raise kind(f"rank {rank} failed while {doing}: {text}")


def _tell(world: World, doing: str, error: BaseException) -> None:
    """The failure of this rank goes to all the others, once they have left the block as well."""
    if world.size == 1:
        return

    def complain() -> None:
        print(
            f"acc: rank {world.rank} failed while {doing}, and the other ranks are still at it:",
            file=sys.stderr,
        )
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
        sys.stderr.flush()

    try:
        if leave_block(world, complain):
            world.comm.all_gather_object(
                (f"{type(error).__name__}: {error}", isinstance(error, ReplacedError))
            )
    except (
        RuntimeError
    ) as lost:  # CommError, or torch's: the others are elsewhere or gone, and our own error counts
        print(f"acc: rank {world.rank} could not tell the others ({lost})", file=sys.stderr, flush=True)


def agree(world: World, value: Any, what: str) -> Any:
    """`value` when all ranks have the same; CheckpointError on all, naming the ranks and values, when they differ."""
    values = world.comm.all_gather_object(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise CheckpointError(
                f"the ranks disagree on {what}: rank 0 has {values[0]}, rank {rank} has {other}"
            )
    return value
