"""Which indices, and which elements of a stream, belong to a rank: pure arithmetic.

[Note: the tail] Batches go to the ranks in turn; a *group* is one batch for each. Only the last group can be a tail: with too few
batches, or with a short last one. `drop_last` drops it. Otherwise `even_batches` completes it with samples from the start of the
epoch, so that every rank has as many batches of the same size, and without `even_batches` the ranks get what there is. `Tail` says
how many rows of each rank are samples, so that metrics can leave the repeated ones out. A batch sampler of the user's own may give short
batches anywhere; a rank that would get nothing of one is completed, too, as all ranks must be in step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def spread(batch: Sequence[Any], ranks: int) -> list[Sequence[Any]]:
    """`batch` in a piece for each rank, as equal as can be, the longer ones first."""
    share, longer = divmod(len(batch), ranks)
    ends = [share * rank + min(rank, longer) for rank in range(ranks + 1)]
    return [batch[begin:end] for begin, end in itertools.pairwise(ends)]


class TailsByNumber:
    """The groups of a pass that are not whole, by the number of the rank's batch. Samplers are read ahead, so the last one may be told early.

    `agree(indices, items)`, if there is one, makes the items that are read from `indices` the same on all ranks. `last_tail` is that of the batch
    that was read last.
    """

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self.last_tail: Tail | None = None
        self.agree: Callable[[Any, Iterable[Any]], Iterator[Any]] | None = None

    def same_on_all_ranks(self, indices: Any, items: Iterable[Any]) -> Iterable[Any]:
        """The items of a pass over `indices`."""
        return items if self.agree is None else self.agree(indices, items)

    def noting(self, batches: Iterable[tuple[Any, Tail | None]]) -> Iterator[Any]:
        """The batches alone; their tails are noted on the way."""
        tails = self._tails
        self.last_tail = None
        for number, (batch, tail) in enumerate(batches, start=1):
            self.last_tail = tail
            if tail is not None:
                tails[number] = tail
            elif tails:
                tails.pop(number, None)  # of an earlier pass
            yield batch

    def tail_of(self, number: int) -> Tail | None:
        """What the group of the rank's batch `number`, from 1, consists of; None where it is whole."""
        return self._tails.get(number)


class BatchSamplerShard(TailsByNumber, BatchSampler):
    """The batches of one rank.

    Non-split: whole batches in turn. Split: a slice of every batch, whose size must then be a multiple of `num_processes`
    (`ValueError`). `even_batches` completes the tail with samples from the start; a batch sampler with `drop_last` drops it; otherwise
    the ranks get unequal numbers. Batches of the sampler are never changed.
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
        TailsByNumber.__init__(self)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
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
        return self.noting(self._split() if self.split_batches else self._in_turn())

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

    def _all_batches(self) -> Iterable[list[Any]]:
        """The batches of all ranks, as lists: a batch sampler of the user's own may yield tuples, tensors or generators."""
        return self.same_on_all_ranks(self.batch_sampler, map(list, self.batch_sampler))

    def _in_turn(self) -> Iterator[tuple[list[Any], Tail | None]]:
        ranks, rank, size = self.num_processes, self.process_index, self.batch_size
        group: list[Any] = []
        first: list[Any] | None = None
        for batch in self._all_batches():
            if len(group) == ranks:  # it was kept back because its last batch is short, but more follows
                yield group[rank], None
                group = []
            group.append(batch)
            if len(group) < ranks:
                continue
            first = first if first is not None else _joined(group)
            if size is None or len(batch) == size:
                yield group[rank], None
                group = []
        if group:
            yield from self._last(group, first if first is not None else _joined(group), size)

    def _split(self) -> Iterator[tuple[list[Any], Tail | None]]:
        ranks, rank, size = self.num_processes, self.process_index, self.batch_size
        share = size // ranks
        first: Sequence[Any] = ()
        held: Sequence[Any] | None = None
        for batch in self._all_batches():
            if held is not None:  # short, but more follows
                yield self._of_short(held, first)
                held = None
            first = first or batch
            if len(batch) < size:
                held = batch
                continue
            yield list(part_of(batch, rank, share)), None
        if held is not None:
            yield from self._last([part_of(held, r, share) for r in range(ranks)], first, share)

    def _of_short(self, batch: Sequence[Any], first: Sequence[Any]) -> tuple[list[Any], Tail | None]:
        """This rank's piece of a short batch in the middle; none is empty."""
        pieces = spread(batch, self.num_processes)
        if pieces[-1]:
            return list(pieces[self.process_index]), None
        batches, tail = complete(pieces, first, self.num_processes, 1)
        return batches[self.process_index], tail

    def _last(
        self, group: list[Any], first: Sequence[Any], size: int | None
    ) -> Iterator[tuple[list[Any], Tail | None]]:
        """The tail's batch of this rank, if it has one."""
        ranks, rank = self.num_processes, self.process_index
        whole = len(group) == ranks and (size is None or all(len(batch) == size for batch in group))
        if self.drop_last and not whole:
            return
        if self.even_batches and not whole:
            batches, tail = complete(group, first, ranks, size)
            yield batches[rank], tail
            return
        sizes = tuple(len(group[r]) if r < len(group) else 0 for r in range(ranks))
        if sizes[rank]:
            yield list(group[rank]), Tail(real=sizes, sizes=sizes)


class IndexShard(TailsByNumber):
    """The indices of one rank, for a loader without batches (`batch_size=None`): one in turn for each rank.

    Such a loader has no rows, so in a tail a rank has its item (1) or repeats another (0).
    """

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool) -> None:
        super().__init__()
        self.sampler = sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches

    @property
    def trusted_inner(self) -> Any:
        """What the length is computed from."""
        return self.sampler

    def __len__(self) -> int:
        return self.length_of(self.process_index)

    def length_of(self, rank: int) -> int:
        """How many items `rank` has."""
        whole, rest = divmod(len(self.sampler), self.num_processes)
        return whole + (1 if rest and (self.even_batches or rank < rest) else 0)

    def __iter__(self) -> Iterator[Any]:
        return self.noting(self._in_turn())

    def _in_turn(self) -> Iterator[tuple[Any, Tail | None]]:
        ranks, rank = self.num_processes, self.process_index
        first: list[Any] = []
        group: list[Any] = []
        for index in self.same_on_all_ranks(self.sampler, self.sampler):
            group.append(index)
            if len(group) == ranks:
                first = first or group
                yield group[rank], None
                group = []
        if not group:
            return
        real = tuple(int(r < len(group)) for r in range(ranks))
        if self.even_batches:
            batches, _ = complete([[index] for index in group], first or group, ranks, 1)
            yield batches[rank][0], Tail(real=real, sizes=(1,) * ranks)
        elif real[rank]:
            yield group[rank], Tail(real=real, sizes=real)

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
        self.tail: Tail | None = None  # of the last pass in this process

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
        self.tail = None
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
        tail = self.tail = Tail(real=real, sizes=(share,) * self.num_processes)
        filled = list(itertools.islice(itertools.chain(group, itertools.cycle(first)), self.group_size))
        for place in mine:
            # marked even where every element is this rank's own: the other ranks' rows have to be known as well
            yield Repeated(filled[place], tail) if self.marks else filled[place]


def _joined(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))
