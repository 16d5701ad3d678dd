"""Loaders that their user has split over the ranks already: they are used as they are, and what their last batch consists of is found out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from acc_trainer.data.adapter import index_sampler, is_stream
from acc_trainer.data.samplers import get_sampler
from acc_trainer.data.shard import BatchSamplerShard, IndexShard, IterableDatasetShard, Tail

logger = logging.getLogger(__name__)
NOT_SPLIT: Any = object()


def parts_of(loader: Any) -> int:
    """Over how many ranks the samples are split; 1 where they are not, as far as one can see."""
    if is_stream(loader):
        dataset = loader.dataset
        if isinstance(dataset, IterableDatasetShard):
            return dataset.num_processes
        # split_dataset_by_node of `datasets` notes it here
        return int(getattr(getattr(dataset, "_distributed", None), "world_size", 1))
    for sampler in _chain(index_sampler(loader)):
        if isinstance(sampler, (BatchSamplerShard, IndexShard)):
            return sampler.num_processes
        parts = getattr(sampler, "num_replicas", None)
        if isinstance(parts, int) and hasattr(sampler, "rank"):
            return parts
    return 1


def tail_of_distributed(loader: Any, ranks: int) -> Any:
    """What the last batch of a loader that is split already consists of (None: it is known elsewhere, or every row is a sample), or `NOT_SPLIT`."""
    parts = parts_of(loader)
    if parts < 2:
        return NOT_SPLIT
    if parts != ranks:
        logger.warning(
            "the loader's samples are split over %d ranks already, but there are %d: it is used as it is, not split again",
            parts,
            ranks,
        )
        return None
    sampler = get_sampler(loader)
    size = getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(sampler, DistributedSampler) or size is None or drops_last(loader):
        return None
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if repeated <= 0:
        return None
    rows = len(sampler) % size or size
    real = tuple(rows - (1 if rank >= parts - repeated else 0) for rank in range(parts))
    return Tail(real=real, sizes=(rows,) * parts)


def drops_last(loader: Any) -> bool:
    """Whether a short last batch is left out."""
    return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))


def _chain(sampler: Any) -> Iterator[Any]:
    """A sampler, and those inside it from the outside in."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
