"""What a batch can be: on the CPU already, or read by a worker that knows more about it than the loader does."""

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
