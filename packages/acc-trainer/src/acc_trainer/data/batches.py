"""A batch on its way out of a loader: a worker may know more about it, it goes to the device, and the position goes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acc_ops.tree import send_to_device
from acc_trainer.data.shard import Repeated, Tail


class BatchWithTail:
    """A batch read by a worker, with what the worker knows of the last group."""

    __slots__ = ("batch", "tail")

    def __init__(self, batch: Any, tail: Tail) -> None:
        self.batch = batch
        self.tail = tail

    def pin_memory(self, device: Any = None) -> BatchWithTail:
        """Called by torch's loader for a batch of a class it does not know."""
        from torch.utils.data._utils.pin_memory import pin_memory  # noqa: PLC0415 (torch's own helper, only on a GPU)

        return BatchWithTail(pin_memory(self.batch, device), self.tail)


class CollateWithTail:
    """The user's collate function, given the elements themselves; the mark that some repeat others goes around the batch."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, elements: Any) -> Any:
        if type(elements) is Repeated:  # a loader without batches
            return BatchWithTail(self.collate(elements.element), elements.tail)
        if not isinstance(elements, list) or not any(type(one) is Repeated for one in elements):
            return self.collate(elements)
        tail = next(one.tail for one in elements if type(one) is Repeated)
        plain = [one.element if type(one) is Repeated else one for one in elements]
        return BatchWithTail(self.collate(plain), tail)


def mover(device: torch.device | None, non_blocking: bool) -> Callable[[Any], Any] | None:
    """What takes a batch to `device`; None where there is nothing to do.

    A batch that is a tensor, or a flat container of tensors, and on the CPU already is seen at a glance: this runs for every batch.
    """
    if device is None:
        return None

    def move(batch: Any) -> Any:
        return send_to_device(batch, device, non_blocking=non_blocking)

    def stay(batch: Any) -> Any:
        kind = type(batch)
        if kind is torch.Tensor:
            return batch if batch.is_cpu else move(batch)
        if kind is dict:
            leaves = batch.values()
        elif kind is list or kind is tuple:
            leaves = batch
        else:
            return move(batch)
        for leaf in leaves:
            if type(leaf) is not torch.Tensor or not leaf.is_cpu:
                return move(batch)
        return batch

    return stay if device.type == "cpu" else move


def handing_out(loader: Any) -> Callable[..., Any]:
    """What every batch of a pass over a prepared loader goes through on its way out; made when the pass reads its first batch.

    `hand_out(batch, number, is_last, tail=None, ends_window=False)` gives the batch on the loader's device. `tail`: which rows are samples, where
    not all are. `ends_window`: it is the last batch of another rank. It runs for every batch, so it looks things up once.
    """
    position, grad_sync = loader.position, loader.grad_sync
    move = mover(loader.device, loader._non_blocking)
    loaders, raise_to_top = grad_sync.loaders, grad_sync.raise_to_top

    def hand_out(
        batch: Any, number: int, is_last: bool, tail: Tail | None = None, ends_window: bool = False
    ) -> Any:
        position.batches = number
        position.is_last = is_last
        position.ends_window = is_last or ends_window
        if tail is None:
            position.real = position.sizes = None
            position.padding = 0
        else:
            position.real, position.sizes = tail.real, tail.sizes
            rank = loader.world.rank if loader._rank is None else loader._rank
            position.padding = tail.sizes[rank] - tail.real[rank]
        if not loaders or loaders[-1] is not position:
            raise_to_top(position)
        return batch if move is None else move(batch)

    return hand_out
