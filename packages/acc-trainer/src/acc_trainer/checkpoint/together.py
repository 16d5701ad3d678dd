"""What fails on one rank fails on all: nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from acc_ops.world import World

from .layout import CheckpointError


@contextmanager
def together(world: World, doing: str) -> Iterator[None]:
    """All ranks run the block and leave it together; a failure on one raises there as it is, elsewhere as CheckpointError.

    The block itself must not speak to other ranks outside of calls that every rank makes.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        said = world.comm.all_gather_object(
            None if failure is None else f"{type(failure).__name__}: {failure}"
        )
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed and failure is None:
            rank, text = failed[0]
            raise CheckpointError(f"rank {rank} failed while {doing}: {text}")


def agree(world: World, value: Any, what: str) -> Any:
    """`value` when all ranks have the same; CheckpointError on all, naming the ranks and values, when they differ."""
    values = world.comm.all_gather_object(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise CheckpointError(
                f"the ranks disagree on {what}: rank 0 has {values[0]}, rank {rank} has {other}"
            )
    return value
