"""Streams that are split by their shards, so that each rank reads its own alone: kept in step, as nobody knows how long a shard is.

[Note: one small exchange a batch] Each rank tells how many rows its next batch has, while it reads one ahead; none at the end of its shards. So all
know which batch is the last, which rows are samples, and who has run out: that rank repeats its first batch until the others are done, or,
with `drop_last`, all stop with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from acc_ops.world import World
from acc_trainer.data.shard import Tail
from acc_trainer.data.skipping import END


class InStep(NamedTuple):
    """A batch of this rank, with what is known of those of the others."""

    batch: Any
    is_last: bool
    tail: Tail | None


def own_shards(dataset: Any, ranks: int, rank: int) -> Any:
    """This rank's shards of a stream, where it has enough for all ranks and can be asked for some (as those of `datasets` can); else None."""
    shards = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    shard = getattr(dataset, "shard", None)
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < ranks or not callable(shard):
        return None
    return shard(num_shards=ranks, index=rank)


def in_step(
    first: Any,
    read: Callable[[], Any],
    rows_in: Callable[[Any], int],
    world: World,
    *,
    drop_last: bool,
    begin: Any,
) -> Iterator[InStep]:
    """The batches from `first` on (`END`: there is none), which `read` gives, on all ranks as many.

    `begin` is this rank's first batch of the epoch, which it repeats; `END` where it had none. Raises `RuntimeError` on every rank when one has nothing
    to repeat.
    """

    def told(batch: Any) -> list[tuple[int, int]]:
        """For each rank the rows that are samples in its next batch, and the rows there are."""
        real = 0 if batch is END else rows_in(batch)
        size = real if batch is not END else 0 if begin is END else rows_in(begin)
        return [(a, b) for a, b in world.comm.all_gather(torch.tensor([real, size])).tolist()]

    def is_over(ranks: list[tuple[int, int]]) -> bool:
        over = [not real for real, _ in ranks]
        return any(over) if drop_last else all(over)

    batch, ranks = first, told(first)
    while not is_over(ranks):
        if (0, 0) in ranks:
            raise RuntimeError(
                f"rank {ranks.index((0, 0))} has shards without a sample, so it has no batch to take part with: use "
                "dispatch_batches=True, or a stream with more samples in each shard"
            )
        following = END if batch is END else read()
        next_ranks = told(following)
        real, sizes = zip(*ranks, strict=True)
        tail = None if real == sizes and len(set(sizes)) == 1 else Tail(real=real, sizes=sizes)
        yield InStep(begin if batch is END else batch, is_over(next_ranks), tail)
        batch, ranks = following, next_ranks
