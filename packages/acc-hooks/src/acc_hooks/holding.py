"""The real tensors of one module, put in for the time of its calls and taken out again.

An interrupt may come anywhere: each tensor is written down before it is put in and struck off after it was taken out, what
has to go home is written down until it is there, and `end` goes on where an earlier one stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from acc_hooks.fetching import Fetched
from acc_hooks.held import Held, host, is_guest, see_off
from acc_hooks.homes import add_statistics
from acc_hooks.placeholder import copy_flag
from acc_hooks.tensors import TiedParams, owner_of, put_tensor
from acc_hooks.together import call_all
from acc_hooks.values import Slot, Values


class Holding:
    """1 `begin` 2 `end`; who counts the calls between them locks."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.held: dict[str, Held] = {}
        self.guests: set[str] = set()  # names that somebody else's tensors had in the last hold
        self.device: torch.device | None = None
        self.is_complete = True  # everything is in the module, or nothing
        self._changed: dict[str, tuple[Tensor, Held | None]] = {}  # has to go home

    def begin(
        self,
        module: nn.Module,
        slots: Mapping[str, Slot],
        weights_map: Mapping[str, Tensor],
        device: torch.device,
        tied_params_map: TiedParams | None,
        fetched: Mapping[str, Fetched],
    ) -> None:
        """Put the real tensors on `device` into the module; none is left there when it raises."""
        self.device, self.is_complete = device, False
        self.guests.clear()
        try:
            for slot in slots.values():
                owner, leaf = owner_of(module, slot.name)
                current = current_tensor(owner, leaf)
                if current is None:
                    continue
                if is_guest(current, slot.placeholder, slot.full):
                    self.guests.add(slot.name)
                    self.held[slot.name] = held = host(current, device)
                    put_tensor(owner, leaf, held.tensor)
                    continue
                if current is not slot.placeholder:  # moved, or converted, to another tensor without values
                    self._values.stand_alone(slot, current)
                    put_tensor(owner, leaf, slot.placeholder)
                found = fetched.get(slot.name) or Fetched(value=self._values.read(slot, weights_map))
                held = self._values.copy(slot, found, device, tied_params_map)
                self.held[slot.name] = held
                put_tensor(owner, leaf, held.tensor)
                add_statistics(held.tensor, slot.name, weights_map, device)
            self.is_complete = True
        except BaseException:
            self.end(module, slots, weights_map, tied_params_map, compare=False)
            raise

    def end(
        self,
        module: nn.Module,
        slots: Mapping[str, Slot],
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None,
        compare: bool,
    ) -> None:
        """Bring the placeholders back, and changes home: all that can go home does so before it raises."""
        self.is_complete = False
        for name in list(self.held):
            self._take_out(module, slots[name], weights_map, tied_params_map, compare)
        call_all([functools.partial(self._bring_home, slots[name], weights_map) for name in self._changed])
        self.is_complete = True

    def _take_out(
        self,
        module: nn.Module,
        slot: Slot,
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None,
        compare: bool,
    ) -> None:
        held = self.held[slot.name]
        owner, leaf = owner_of(module, slot.name)
        current = current_tensor(owner, leaf)
        # running statistics are written without being counted
        unseen = owner.training and leaf in owner._buffers
        if held.is_guest:
            if current is held.tensor:
                put_tensor(owner, leaf, see_off(held, unseen))
            del self.held[slot.name]
            return
        if current is held.tensor:
            look = functools.partial(self._values.read, slot, weights_map) if compare or unseen else None
            if held.was_changed(look) or (
                look is not None and self._values.is_another_elsewhere(slot, current, weights_map)
            ):
                self._changed[slot.name] = (current, held)
            copy_flag(slot.placeholder, current.requires_grad)
        elif (
            current is not None and current is not slot.placeholder
        ):  # replaced: a value of its own from now on
            self._changed[slot.name] = (current, None)
            self._values.stand_alone(slot, current)
        put_tensor(owner, leaf, slot.placeholder)
        if self.device is not None:
            if held.tie is not None:
                self._values.residents.release(held.tie, self.device)
            if held.pointer is not None and tied_params_map:
                tied_params_map.get(held.pointer, {}).pop(self.device, None)
        del self.held[slot.name]

    def _bring_home(self, slot: Slot, weights_map: Mapping[str, Tensor]) -> None:
        tensor, held = self._changed[slot.name]
        try:
            self._values.keep(slot, tensor, held, weights_map)
        except Exception:  # it has no home: a later call is not to fail for it
            del self._changed[slot.name]
            raise
        del self._changed[slot.name]


def current_tensor(owner: nn.Module, leaf: str) -> Tensor | None:
    """What the module holds, None if somebody deleted it."""
    return owner._parameters.get(leaf, owner._buffers.get(leaf))
