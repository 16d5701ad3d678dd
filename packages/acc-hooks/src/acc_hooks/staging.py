"""Copies to an accelerator beside what it computes: through pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acc_ops.devices import device_module, device_row, memory_info

_NEEDED = ("Stream", "Event", "stream", "current_stream")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Copies that are under way, by name; `receive` before they are used."""

    tensors: dict[str, Tensor]
    event: Any  # of the side stream, after the last copy


class SideStream:
    """A second stream of one accelerator. `send` may run in another thread than `receive`, in which the model computes."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module  # torch.cuda, torch.xpu, ...
        self._stream = module.Stream(device=device)

    def send(self, values: dict[str, Tensor]) -> Staged | None:
        """Start to copy tensors from the CPU; None where the device has not twice the room that they need."""
        if not values or sum(value.nbytes for value in values.values()) * 2 > self._free_bytes():
            return None
        try:
            with self._module.stream(self._stream):
                tensors = {
                    name: pinned(value).to(self._device, non_blocking=True) for name, value in values.items()
                }
                event = self._module.Event()
                event.record(self._stream)
        except torch.OutOfMemoryError:  # the room is in pieces, or somebody else was faster
            return None
        return Staged(tensors=tensors, event=event)

    def receive(self, staged: Staged) -> None:
        """Let what this thread computes from now on wait for the copies; the thread itself does not wait."""
        stream = self._module.current_stream(self._device)
        stream.wait_event(staged.event)
        keep_for(stream, staged.tensors.values())

    def _free_bytes(self) -> int:
        free = memory_info(self._device).free_bytes
        reserved, allocated = (
            getattr(self._module, name, None) for name in ("memory_reserved", "memory_allocated")
        )
        if reserved is not None and allocated is not None:  # torch's own reserve can be used, too
            free += reserved(self._device) - allocated(self._device)
        return free


def side_stream(device: torch.device) -> SideStream | None:
    """A side stream of the device; None where it has no streams, or does not say what memory is free."""
    if device.type in ("cpu", "meta"):
        return None
    row = device_row(device)
    module = device_module(row)
    if module is None or row.memory is None or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return SideStream(device, module)


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in memory that the accelerator can read by itself; the tensor itself where there is no more of that."""
    try:
        return tensor if tensor.is_pinned() else tensor.pin_memory()
    except RuntimeError:
        return tensor


def keep_for(stream: Any, tensors: Iterable[Tensor]) -> None:
    """The memory of the tensors is not used again before what `stream` was given by then is done."""
    for tensor in tensors:
        tensor.record_stream(stream)
