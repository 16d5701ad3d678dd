"""A pass that does not begin at the beginning: what it leaves out, and with which generators it draws its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from acc_trainer.data.adapter import clone_loader, with_indices
from acc_trainer.data.position import LoaderPosition

END = object()  # what `next` gives behind the last batch


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
        before = torch.get_rng_state()
        try:
            alone = {
                "num_workers": 0,
                "prefetch_factor": None,
                "persistent_workers": False,
                "generator": None,
            }
            return next(iter(clone_loader(with_indices(loader, [self.indices.first]), **alone)))
        finally:
            torch.set_rng_state(before)  # an extra read must not change what the run draws


def dropping(batches: Iterator[Any], count: int, skipped: Skipped | None = None) -> Iterator[Any]:
    """The iterator after `count` batches were read and dropped."""
    for place in range(count):
        batch = next(batches, END)
        if batch is END:
            break
        if place == 0 and skipped is not None:
            skipped.batches.append(batch)
    return batches


class replaying:
    """Inside, torch's generators are as they were when the saved epoch began; afterwards as they are now."""

    def __init__(self, position: LoaderPosition) -> None:
        self.position = position
        self._now: torch.Tensor | None = None

    def __enter__(self) -> None:
        self._now = torch.get_rng_state()
        states = self.position.rng or {}
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        if self.position.generator is not None and "generator" in states:
            self.position.generator.set_state(states["generator"])

    def __exit__(self, *error: Any) -> None:
        if self._now is not None:
            torch.set_rng_state(self._now)
