"""A pass that does not begin at the beginning: what it leaves out, and with which generators it draws its order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from acc_trainer.data.adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    clone_loader,
    with_indices,
)
from acc_trainer.data.draws import as_then
from acc_trainer.data.position import LoaderPosition
from acc_trainer.data.samplers import check_skip

END = object()  # what `next` gives behind the last batch


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that leaves out its first `skip_batches` batches by reading and dropping them; for iterable data sets."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = check_skip(skip_batches)

    @classmethod
    def over(cls, base: Any, skip_batches: int) -> Any:
        """The same around a loader that exists already."""
        made = object.__new__(cls)
        made._adopt(base)
        made.skip_batches = skip_batches
        return made

    def __iter__(self) -> Iterator[Any]:
        yield from dropping(iter(self.base_dataloader), self.skip_batches)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)


class Skipped:
    """What a pass left out at its beginning: its first batch, or the indices of that."""

    __slots__ = ("batches", "indices")

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.indices: Any = None

    def first_batch(self, loader: Any) -> Any:
        """The first batch of the epoch, read again where only its indices are known."""
        if self.batches:
            return self.batches[0]
        alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "generator": None}
        with as_then({}):  # an extra read must not change what the run draws
            return next(iter(clone_loader(with_indices(loader, [self.indices.first]), **alone)))


def dropping(batches: Iterator[Any], count: int, skipped: Skipped | None = None) -> Iterator[Any]:
    """The iterator after `count` batches were read and dropped."""
    for place in range(count):
        batch = next(batches, END)
        if batch is END:
            break
        if place == 0 and skipped is not None:
            skipped.batches.append(batch)
    return batches


@contextmanager
def replaying(position: LoaderPosition) -> Iterator[None]:
    """Inside, the generators are as they were when the saved epoch began; afterwards as they are now."""
    with as_then({}):
        position.put_back(position.rng or {})
        yield


def first_read(batches: Iterator[Any], position: LoaderPosition) -> Any:
    """The first batch of a pass, or `END`; after a resume read with the generators as they were when the saved run read it ahead."""
    if position.resumed is None:
        return next(batches, END)
    with as_then(position.resumed):
        return next(batches, END)
