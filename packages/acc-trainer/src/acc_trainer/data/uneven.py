"""Ranks with unequal numbers of batches: torch's Join around the loop, and loaders that give each rank just what there is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from acc_ops.world import World
from acc_trainer.data.adapter import index_sampler

logger = logging.getLogger(__name__)


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any], even_batches: bool | None, loaders: Sequence[Any], world: World
) -> Iterator[None]:
    """Inside, a rank that runs out of batches shadows the collectives of the others.

    `even_batches` overrides that option for the map-style loaders, and is put back afterwards; loaders that have none are left alone.
    """
    if world.size == 1:
        yield
        return
    with _overridden(loaders, even_batches), _joined(joinables):
        yield


@contextmanager
def _overridden(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    if even_batches is None:
        yield
        return
    shards = [
        index_sampler(loader.base_dataloader) for loader in loaders if hasattr(loader, "base_dataloader")
    ]
    before = [(shard, shard.even_batches) for shard in shards if hasattr(shard, "even_batches")]
    if not before:
        logger.warning(
            "even_batches=%s has no effect: no prepared loader is split by its sampler", even_batches
        )
    try:
        for shard, _ in before:
            shard.even_batches = even_batches
        yield
    finally:
        for shard, value in before:
            shard.even_batches = value


@contextmanager
def _joined(joinables: Sequence[Any]) -> Iterator[None]:
    # loaded here: most runs never join, and the module costs time
    from torch.distributed.algorithms.join import Join, Joinable  # noqa: PLC0415

    joining = [one for one in joinables if isinstance(one, Joinable)]
    if len(joining) < len(joinables):
        others = sorted({type(one).__name__ for one in joinables if not isinstance(one, Joinable)})
        logger.warning(
            "join_uneven_inputs has no effect on %s: only models under DistributedDataParallel (and torch's own Joinables) can join",
            ", ".join(others),
        )
    if not joining:
        yield
        return
    with Join(joining, enable=True, throw_on_early_termination=False):
        yield
