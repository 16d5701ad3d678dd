"""One order for all ranks, where each has a sampler of the user's own: it may draw from generators that stand elsewhere on every rank.

[Note: rank 0's order counts] Each rank reads its own sampler, so that generators and counters move as they would without us, and the ranks compare
a digest of what came. Only where they differ rank 0 hands out its order. A whole pass is read at once (its `len()`), so that is one small
collective a pass; a sampler without a length, or one that gives more than it says, is read a piece at a time, as it may have no end.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from acc_ops.exchange import Call, agree, tried
from acc_ops.world import World, current_world
from acc_trainer.data.samplers import SkipBatchSampler

_PIECE = 64  # items of a sampler without a length that are read at once


def agreed(indices: Any, items: Iterable[Any], world: World | None = None) -> Iterator[Any]:
    """The `items` of a pass over `indices`: this rank's, or rank 0's where they are not the same on all ranks.

    All ranks must read as many of them. Raises what reading the sampler raises; where only some ranks fail, `MismatchError` on every rank.
    """
    world = world if world is not None else current_world()
    if world.size == 1 or _surely_alike(indices):
        yield from items
        return
    own, size = iter(items), _length_of(indices)
    ended = False
    while not ended:
        piece, error = tried(lambda: list(itertools.islice(own, size + 1)))  # one more shows the end
        if error is not None and not world.verify:
            raise error
        piece = piece or []
        read = [_packed(item) for item in piece], len(piece) <= size
        if not world.verify or not _same_on_all_ranks(read, error, world):
            read = world.comm.broadcast_object(read)
            piece = [_unpacked(item) for item in read[0]]
        ended = read[1]
        yield from piece


def _same_on_all_ranks(read: Any, error: Exception | None, world: World) -> bool:
    digest = hashlib.blake2b(pickle.dumps(read), digest_size=16).digest()
    return agree(world, Call(name="reading a sampler", sizes_digest=digest, error=error)).same_sizes


class _Packed(NamedTuple):
    """A tensor, which pickles with all of its storage: one index of `iter(torch.randperm(n))` with n numbers."""

    numbers: Any
    dtype: torch.dtype


def _packed(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return _Packed(item.tolist(), item.dtype)
    return [_packed(one) for one in item] if type(item) is list else item


def _unpacked(item: Any) -> Any:
    if type(item) is _Packed:
        return torch.tensor(item.numbers, dtype=item.dtype)
    return [_unpacked(one) for one in item] if type(item) is list else item


def _surely_alike(indices: Any) -> bool:
    """Whether `indices` draw nothing, or from a generator that we gave the same seed on all ranks."""
    while type(indices) in (BatchSampler, SkipBatchSampler):
        indices = indices.batch_sampler if type(indices) is SkipBatchSampler else indices.sampler
    return type(indices) is SequentialSampler or getattr(indices, "follows_shared_seed", False) is True


def _length_of(indices: Any) -> int:
    try:
        return len(indices) or _PIECE
    except (TypeError, NotImplementedError):
        return _PIECE
