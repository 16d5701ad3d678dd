"""Ranks with unequal numbers of batches: torch's Join around the loop, and loaders that give each rank just what there is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from acc_ops.world import World
from acc_plugins.support import UnsupportedError
from acc_trainer.data.adapter import index_sampler

logger = logging.getLogger(__name__)


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any],
    even_batches: bool | None,
    loaders: Sequence[Any],
    world: World,
    waits_for_all: bool = False,
) -> Iterator[None]:
    """Inside, a rank that runs out of batches shadows the collectives of the others.

    `even_batches` overrides that option for the map-style loaders, and is put back afterwards; loaders that have none are left alone. Raises
    UnsupportedError for models that cannot join where `waits_for_all` says that a rank without a batch would leave the others waiting.
    """
    if world.size == 1:
        yield
        return
    if waits_for_all:
        _refuse_shards(joinables)
    with _overridden(loaders, even_batches), _joined(joinables):
        yield


def _refuse_shards(joinables: Sequence[Any]) -> None:
    from torch.distributed.algorithms.join import Joinable  # noqa: PLC0415

    alone = next((one for one in joinables if not isinstance(one, Joinable)), None)
    if alone is not None:
        raise UnsupportedError(
            f"join_uneven_inputs cannot join {type(alone).__name__}: under this strategy all ranks compute every step together, and would wait for ever "
            "for one that has run out of batches. Give all of them the same number: even_batches=True (the default), or drop_last=True in the "
            "DataLoader"
        )


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
