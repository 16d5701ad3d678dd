"""Where the gradients of FSDP1's flat parameters lie between two micro-batches.

[Note: two of one flat parameter] A micro-batch under `no_sync` leaves this rank's whole gradient in `grad`. What a backward that synchronised has left
before it in the same window, this rank's part of the average, torch has then put aside in `_saved_grad_shard`, and its next backward that
synchronises adds to that. Nobody else looks there, so who exchanges, empties or keeps the one gradient does so with the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acc_plugins.states.names import plain_name
from acc_plugins.strategies.gradients import (
    GradientPlace,
    Places,
    Saved,
    known_to_us,
    misfit_of,
    of_parameters,
    unpacked,
)


class OfFlatParameter(GradientPlace):
    """The gradient of one flat parameter: under `no_sync` the whole one of this rank, else this rank's part."""

    def __init__(self, handle: Any) -> None:
        flat = handle.flat_param
        self.parameters = (flat, *(flat._params or ()), *(flat._shared_params or ()))
        self._handle = handle
        self._before = PutAside(handle)

    def take(self) -> Saved | None:
        gradient = self._handle.flat_param.grad
        return None if gradient is None else gradient.detach()

    def own_part(self) -> Tensor | None:
        self._handle._reset_flat_param_grad_info_if_needed()  # what an optimizer has emptied is not there any more
        flat = self._handle.flat_param
        whole = flat.grad is not None and flat.grad.shape == flat._unpadded_unsharded_size
        gradient: Tensor | None = flat.grad if whole else None
        return gradient

    def to_average(self) -> Tensor | None:
        own, flat = self.own_part(), self._handle.flat_param
        return None if own is None else own.detach().to(self._handle.device, flat.dtype)

    def nothing(self) -> Tensor:
        flat = self._handle.flat_param
        return torch.zeros(flat._unpadded_unsharded_size, dtype=flat.dtype, device=self._handle.device)

    @torch.no_grad()
    def take_average(self, average: Tensor) -> None:
        """The shard as FSDP1 cuts it: equal ones, the last of them filled up."""
        handle, flat = self._handle, self._handle.flat_param
        part = average
        if handle.uses_sharded_strategy:
            before = self._before.take()
            if before is None and self.own_part() is None:
                before = flat.grad
            size = flat._sharded_size.numel()
            part = average.new_zeros(size)
            mine = average[handle.rank * size : (handle.rank + 1) * size]
            part[: mine.numel()] = mine
            part = part if before is None else part + before.to(part)
        self.give(part)

    def give(self, saved: Saved | None) -> None:
        """Nothing is put aside any more: torch would show that one in the place of this."""
        handle, flat = self._handle, self._handle.flat_param
        self._before.give(None)
        for parameter in self.parameters:
            parameter.grad = None
        if saved is None:
            return
        gradient = unpacked(saved, flat.device, None, None)
        if gradient.shape != flat.shape or gradient.dtype != flat.dtype:  # as torch does where sizes differ
            flat.grad = torch.empty_like(flat)
            flat.grad.data = gradient
        else:
            flat.grad = gradient
        if handle._use_orig_params:
            whole = handle.uses_sharded_strategy and gradient.shape == flat._unpadded_unsharded_size
            if whole:
                handle._use_unsharded_grad_views()
            else:
                handle._use_sharded_grad_views()

    def misfit(self, saved: Saved) -> str | None:
        flat = self._handle.flat_param
        return misfit_of(saved, [tuple(flat._unpadded_unsharded_size), tuple(flat._sharded_size)])


class PutAside(GradientPlace):
    """This rank's part of what was averaged before the micro-batches under `no_sync` in the same window. It is given after the gradient itself."""

    def __init__(self, handle: Any) -> None:
        self._flat: Any = handle.flat_param
        self.parameters = (self._flat, *(self._flat._params or ()))

    def take(self) -> Saved | None:
        shard: Tensor | None = getattr(self._flat, "_saved_grad_shard", None)
        return None if shard is None else shard.detach()

    def give(self, saved: Saved | None) -> None:
        vars(self._flat).pop("_saved_grad_shard", None)  # torch adds to what is there, also to None
        if saved is not None:
            self._flat._saved_grad_shard = unpacked(saved, self._flat.device, None, None)

    def misfit(self, saved: Saved) -> str | None:
        return misfit_of(saved, [tuple(self._flat._sharded_size)])

    def forget(self, emptied: Collection[int]) -> None:
        """Let go of those parameters' gradients, which have these `id`s: one flat parameter may be of several optimizers."""
        shard, flat = self.take(), self._flat
        if shard is None:
            return
        if id(flat) in emptied:
            self.give(None)
        for parameter, where in zip(flat._params or (), flat._shard_param_infos, strict=False):
            if id(parameter) in emptied and where.in_shard:
                shard[where.offset_in_shard : where.offset_in_shard + where.numel_in_shard] = 0


def of_flat_parameters(module: nn.Module) -> Places:
    """The places of a module with FSDP1's units: their flat parameters, and what they leave out. UnsupportedError for a torch that keeps them elsewhere."""
    flat: Places = {}
    with known_to_us("the gradients of FSDP1"):
        for name, handle in _handles(module):
            flat[f"{plain_name(name)} (flat)"] = place = OfFlatParameter(handle)
            flat[f"{plain_name(name)} (put aside)"] = PutAside(handle)
            place.misfit(torch.empty(0))
    inside = {id(parameter) for place in flat.values() for parameter in place.parameters}
    apart = {
        name: place for name, place in of_parameters(module).items() if id(place.parameters[0]) not in inside
    }
    return {**flat, **apart}


def put_aside(module: nn.Module) -> list[PutAside]:
    """The places among them that no parameter shows."""
    return [PutAside(handle) for _, handle in _handles(module)]


def _handles(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        handle = getattr(part, "_handle", None)
        if handle is not None:
            yield name, handle
