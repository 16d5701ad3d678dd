"""Samplers whose order is a function of (seed, epoch), and samplers that leave out the first batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_RANDOM = (
    SubsetRandomSampler,
    WeightedRandomSampler,
)  # with RandomSampler: torch's samplers that take a generator


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order depends only on its seed plus the epoch.

    The seed is `data_seed`, else the initial seed of `generator`, else torch's initial seed. The epoch is set by `set_epoch` and moves
    on by one after each full pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        given = self.generator
        if data_seed is not None:
            self.initial_seed = int(data_seed)
        else:
            self.initial_seed = given.initial_seed() if given is not None else torch.initial_seed()
        self.generator = torch.Generator()  # its own: the user's generator is never moved
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        # one for each pass: a pass inside another must not draw from that one's
        self.generator = torch.Generator().manual_seed(epoch_seed(self.initial_seed, self.epoch))
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next pass has the order of epoch `epoch`."""
        self.epoch = int(epoch)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch, in torch's range of seeds."""
    return (seed + epoch) % (1 << 63)


class SeededPerEpoch:
    """Gives a sampler that draws from its `generator` a new one for each epoch, so that passes inside each other do not share it."""

    __slots__ = ("sampler", "seed")

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """The next draw is the one of epoch `epoch`."""
        self.sampler.generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))


def is_random(sampler: Any) -> bool:
    """Whether `sampler` is one of torch's random samplers or derived from one, which can be given another generator."""
    if not isinstance(sampler, (RandomSampler, *_RANDOM)) or isinstance(sampler, SeedableRandomSampler):
        return False
    return "generator" in vars(sampler)  # a class of the user's may have none


def seedable(sampler: Any, seed: int) -> tuple[Any, Any]:
    """A copy of a random sampler (`is_random`) ordered by (seed, epoch), and what to tell the epoch.

    The user's own sampler object is left as it is (`made_from` of the copy). `follows_shared_seed` of the copy says that nothing else can
    move its order.
    """
    if type(sampler) is RandomSampler:
        made = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            data_seed=seed,
        )
        made.follows_shared_seed = True  # type: ignore[attr-defined]
        made.made_from = sampler  # type: ignore[attr-defined]
        return made, made
    twin = copy.copy(sampler)
    twin.generator = torch.Generator()
    twin.follows_shared_seed = any(
        type(sampler).__iter__ is one.__iter__ for one in (RandomSampler, *_RANDOM)
    )
    twin.made_from = sampler
    return twin, SeededPerEpoch(twin, seed)


def has_trusted_length(index_sampler: Any) -> bool:
    """Whether `len()` of the sampler is exact: torch's own samplers and ours, all the way down."""
    if isinstance(index_sampler, SkipBatchSampler):
        return has_trusted_length(index_sampler.batch_sampler)
    inner = getattr(index_sampler, "trusted_inner", None)  # ours: shards
    if inner is not None:
        return has_trusted_length(inner)
    if type(index_sampler) is BatchSampler:
        return has_trusted_length(index_sampler.sampler)
    return type(index_sampler) in (SequentialSampler, RandomSampler, SeedableRandomSampler, *_RANDOM)


class SkippedSamples:
    """A sampler without its first `count` samples."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self.count = count
        self.follows_shared_seed = type(sampler) is SequentialSampler or (
            getattr(sampler, "follows_shared_seed", False) is True
        )

    @property
    def trusted_inner(self) -> Any:
        """What the length is computed from."""
        return self.sampler

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.count, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.count)


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first `skip_batches` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = check_skip(skip_batches)
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.first: Any = None  # of the pass, once it was skipped

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below the batches."""
        return getattr(self.batch_sampler, "sampler", None)

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(self.batch_sampler):
            if place >= self.skip_batches:
                yield batch
            elif place == 0:
                self.first = batch

    @property
    def total_length(self) -> int:
        """Batches of the whole, the skipped ones included."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the batch sampler."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


class ResumedIndices:
    """The indices of a saved epoch from batch `skip` on; `prime` makes the sampler draw its order at once.

    A pass that repeats a saved epoch draws the order from the generator as it was then, but must read the data with the generator
    as it is now, so the two have to come apart. `following` is what the saved run had drawn next, where that is known: a sampler that draws
    while it is read, from a generator that others draw from as well, does not draw it again.
    """

    def __init__(self, sampler: Any, skip: int, following: Any = None) -> None:
        self._rest = SkipBatchSampler(sampler, skip)
        self._following = following
        self._started: _Ahead | None = None

    @property
    def first(self) -> Any:
        """What was skipped first."""
        return self._rest.first

    def __len__(self) -> int:
        return len(self._rest)

    def __iter__(self) -> Iterator[Any]:
        self._started = _Ahead(iter(self._rest))
        return self._started

    def prime(self) -> None:
        """Draw the order of the pass that was begun."""
        if self._started is not None:
            self._started.prime(self._following)


class OneAhead:
    """Indices of which one more is read than was given: `following`, as it was told before anything was read. `ended` tells whether any follow."""

    def __init__(self, following: Any = None) -> None:
        self._indices: Any = ()
        self.following = following
        self.ended = False

    def over(self, indices: Any) -> OneAhead:
        """The same, reading `indices`."""
        self._indices = indices
        return self

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        return self._read(iter(self._indices))  # begun now, as torch does

    def _read(self, rest: Iterator[Any]) -> Iterator[Any]:
        none = object()
        item = next(rest, none)
        while item is not none:
            following = next(rest, none)
            self.ended = following is none
            self.following = None if self.ended else following
            yield item
            item = following


class _Ahead:
    """An iterator that can fetch its first item early."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest
        self._held: list[Any] = []

    def prime(self, instead: Any = None) -> None:
        """Fetch it, and hand out `instead` where that is given."""
        if not self._held:
            self._held.extend(itertools.islice(self._rest, 1))
            if self._held and instead is not None:
                self._held[0] = instead

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self._rest)


def check_skip(count: Any) -> int:
    """`count` as a number of batches to leave out; `ValueError` when it is none."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"the number of batches to skip must be a whole number of at least 0, got {count!r}")
    return count


def get_sampler(dataloader: Any) -> Any:
    """The sampler that orders the samples of a loader, also when its `sampler` yields whole batches.

    None for an iterable data set.
    """
    loader = getattr(dataloader, "base_dataloader", dataloader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler: Any = loader.sampler if batch_sampler is None else batch_sampler
    while isinstance(sampler, BatchSampler) or (
        not isinstance(sampler, Sampler) and hasattr(sampler, "sampler")
    ):
        inner = getattr(sampler, "batch_sampler", None)
        inner = inner if inner is not None else getattr(sampler, "sampler", None)
        if inner is None:
            return sampler
        sampler = inner
    return None if type(sampler).__name__ == "_InfiniteConstantSampler" else sampler
