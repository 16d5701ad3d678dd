"""Which indices, and which elements of a stream, belong to a rank: pure arithmetic.

[Note: the tail] Batches go to the ranks in turn; a *group* is one batch for each. Only the last group can be a tail: with too few
batches, or with a short last one. `drop_last` drops it. Otherwise `even_batches` completes it with samples from the start of the
epoch, so that every rank has as many batches of the same size, and without `even_batches` the ranks get what there is. `Tail` says
how many rows of each rank are samples, so that metrics can leave the repeated ones out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last group: rows that are samples (`real`) and rows there are (`sizes`), for each rank in order."""

    real: tuple[int, ...]
    sizes: tuple[int, ...]


def complete(
    group: Sequence[Sequence[Any]], first: Sequence[Any], ranks: int, size: int | None
) -> tuple[list[list[Any]], Tail]:
    """The group filled up to `ranks` batches of `size` elements by cycling through `first`, the elements of the first group.

    Without a `size`, short batches stay and missing ones are whole batches of the length of the last one given.
    """
    cycle = itertools.cycle(first)
    batches = [list(batch) for batch in group]
    real = [len(batch) for batch in batches] + [0] * (ranks - len(batches))
    for batch in batches:
        batch.extend(itertools.islice(cycle, max(0, (size or 0) - len(batch))))
    while len(batches) < ranks:
        batches.append(list(itertools.islice(cycle, size or max(1, len(batches[-1])))))
    return batches, Tail(real=tuple(real), sizes=tuple(len(batch) for batch in batches))


def part_of(batch: Sequence[Any], rank: int, share: int) -> Sequence[Any]:
    """The slice of `batch` that belongs to `rank` when each rank takes `share` elements."""
    return batch[rank * share : (rank + 1) * share]


class BatchSamplerShard(BatchSampler):
    """The batches of one rank.

    Non-split: whole batches in turn. Split: a slice of every batch, whose size must then be a multiple of `num_processes`
    (`ValueError`). `even_batches` completes the tail with samples from the start; a batch sampler with `drop_last` drops it; otherwise
    the ranks get unequal numbers. Batches of the sampler are never changed. `tail` tells, after a pass, what its last group was.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if not 0 <= process_index < num_processes:
            raise ValueError(f"process_index must be in 0..{num_processes - 1}, got {process_index}")
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.tail: Tail | None = None
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches needs a batch size that is a multiple of the {num_processes} processes, "
                f"got {self.batch_size}; choose another batch_size or split_batches=False"
            )

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below the batches."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def trusted_inner(self) -> Any:
        """What the length is computed from."""
        return self.batch_sampler

    @property
    def total_length(self) -> int:
        """Batches of all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return self.length_of(self.process_index)

    def length_of(self, rank: int) -> int:
        """How many batches `rank` has."""
        total = len(self.batch_sampler)
        if self.split_batches:
            return self._length_of_split(total, rank)
        whole, rest = divmod(total, self.num_processes)
        if not rest or self.drop_last:
            return whole
        return whole + 1 if self.even_batches or rank < rest else whole

    def __iter__(self) -> Iterator[list[Any]]:
        self.tail = None
        return self._split() if self.split_batches else self._in_turn()

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the batch sampler."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def _length_of_split(self, total: int, rank: int) -> int:
        """As many as the batches, but for a short last one in which the rank has no share."""
        if self.even_batches or self.drop_last or not total:
            return total
        try:
            short = len(self.sampler) % self.batch_size
        except TypeError:
            return total
        share = self.batch_size // self.num_processes
        return total - 1 if short and short <= rank * share else total

    def _in_turn(self) -> Iterator[list[Any]]:
        ranks, rank, size = self.num_processes, self.process_index, self.batch_size
        group: list[Any] = []
        first: list[Any] | None = None
        for batch in self.batch_sampler:
            if len(group) == ranks:  # it was kept back because its last batch is short, but more follows
                yield list(group[rank])
                group = []
            group.append(batch)
            if len(group) < ranks:
                continue
            first = first if first is not None else _joined(group)
            if size is None or len(batch) == size:
                yield list(group[rank])
                group = []
        if group:
            yield from self._last(group, first if first is not None else _joined(group), size)

    def _split(self) -> Iterator[list[Any]]:
        ranks, rank, size = self.num_processes, self.process_index, self.batch_size
        share = size // ranks
        first: Sequence[Any] = ()
        held: Sequence[Any] | None = None
        for batch in self.batch_sampler:
            if held is not None:  # short, but more follows
                yield list(part_of(held, rank, -(-len(held) // ranks)))
                held = None
            first = first or batch
            if len(batch) < size:
                held = batch
                continue
            yield list(part_of(batch, rank, share))
        if held is not None:
            yield from self._last([part_of(held, r, share) for r in range(ranks)], first, share)

    def _last(self, group: list[Any], first: Sequence[Any], size: int | None) -> Iterator[list[Any]]:
        """The tail's batch of this rank, if it has one."""
        ranks, rank = self.num_processes, self.process_index
        whole = len(group) == ranks and (size is None or all(len(batch) == size for batch in group))
        if self.drop_last and not whole:
            return
        if self.even_batches and not whole:
            batches, self.tail = complete(group, first, ranks, size)
            yield batches[rank]
            return
        sizes = tuple(len(group[r]) if r < len(group) else 0 for r in range(ranks))
        self.tail = Tail(real=sizes, sizes=sizes)
        if sizes[rank]:
            yield list(group[rank])


class IndexShard:
    """The indices of one rank, for a loader without batches (`batch_size=None`): one in turn for each rank."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool) -> None:
        self.sampler = sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches

    @property
    def trusted_inner(self) -> Any:
        """What the length is computed from."""
        return self.sampler

    @property
    def tail(self) -> Tail | None:
        """The last group: a loader without batches has no rows, so a rank has its item (1) or repeats another (0)."""
        rest = len(self.sampler) % self.num_processes
        if not rest:
            return None
        real = tuple(int(rank < rest) for rank in range(self.num_processes))
        return Tail(real=real, sizes=(1,) * self.num_processes if self.even_batches else real)

    def __len__(self) -> int:
        return self.length_of(self.process_index)

    def length_of(self, rank: int) -> int:
        """How many items `rank` has."""
        whole, rest = divmod(len(self.sampler), self.num_processes)
        return whole + (1 if rest and (self.even_batches or rank < rest) else 0)

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        seen = 0
        for seen, index in enumerate(self.sampler, start=1):
            if len(first) < self.num_processes:
                first.append(index)
            if (seen - 1) % self.num_processes == self.process_index:
                yield index
        rest = seen % self.num_processes
        if rest and self.even_batches and self.process_index >= rest:
            yield first[(self.process_index - rest) % len(first)]

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class Repeated:
    """An element of a stream that repeats an earlier one to fill the last group, with what the group holds."""

    __slots__ = ("element", "tail")

    def __init__(self, element: Any, tail: Tail) -> None:
        self.element = element
        self.tail = tail


class IterableDatasetShard(IterableDataset):
    """The elements of one rank of a stream that every rank reads.

    Each rank takes `batch_size` elements of every `batch_size * num_processes` (of every `batch_size`, which must then be a multiple
    of `num_processes`, with `split_batches`). The last group is filled with the first elements of the stream unless `drop_last`.
    A data set without `set_epoch` but with a `generator` has that generator seeded with the epoch.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches needs a batch size that is a multiple of the {num_processes} processes, "
                f"got {batch_size}; choose another batch_size or split_batches=False"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.marks = False  # the loader asks for `Repeated` elements, which its collate function unwraps

    def set_epoch(self, epoch: int) -> None:
        """Told to the data set when it wants to know."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def group_size(self) -> int:
        """Elements that all ranks take together."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        groups, rest = divmod(len(self.dataset), self.group_size)  # type: ignore[arg-type]
        return (groups + (1 if rest and not self.drop_last else 0)) * (self.group_size // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        share = self.group_size // self.num_processes
        mine = range(self.process_index * share, (self.process_index + 1) * share)
        first: list[Any] = []
        group: list[Any] = []
        for element in self.dataset:
            group.append(element)
            if len(group) == self.group_size:
                first = first or group
                yield from group[mine.start : mine.stop]
                group = []
        if group and not self.drop_last:
            yield from self._last(group, first or group, share, mine)

    def _last(self, group: list[Any], first: list[Any], share: int, mine: range) -> Iterator[Any]:
        real = tuple(min(share, max(0, len(group) - rank * share)) for rank in range(self.num_processes))
        tail = Tail(real=real, sizes=(share,) * self.num_processes)
        filled = list(itertools.islice(itertools.chain(group, itertools.cycle(first)), self.group_size))
        for place in mine:
            # marked even where every element is this rank's own: the other ranks' rows have to be known as well
            yield Repeated(filled[place], tail) if self.marks else filled[place]


def _joined(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))
