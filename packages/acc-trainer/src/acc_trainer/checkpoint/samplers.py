"""The file `sampler.bin` of the specification: where the order of a loader stands whose sampler is seeded beside a stream that is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acc_trainer.data.samplers import SeedableRandomSampler, get_sampler
from acc_trainer.data.shard import IterableDatasetShard


def keeps_sampler(loader: Any) -> bool:
    """Whether the specification has a file for the sampler of this loader."""
    base = getattr(loader, "base_dataloader", None)
    return isinstance(getattr(base, "dataset", None), IterableDatasetShard) and isinstance(
        get_sampler(base), SeedableRandomSampler
    )


def sampler_state(loader: Any) -> dict[str, int] | None:
    """What the file holds: plain numbers, not the sampler itself, which would bring the whole data set with it. None where there is no file."""
    if not keeps_sampler(loader):
        return None
    sampler = get_sampler(loader)
    return {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}


def give_sampler(loader: Any, state: Any) -> None:
    """Let the loader's sampler go on with the seed and epoch of `state`: a mapping, or, where unpickling was allowed, a whole sampler."""
    sampler = get_sampler(loader)
    numbers = state if isinstance(state, Mapping) else vars(state)
    sampler.initial_seed = int(numbers["initial_seed"])
    sampler.set_epoch(int(numbers["epoch"]))
