"""The tensors of one module that live in a weights map, and on the module only while they are used.

See resident.py for what a placeholder, a home and a copy are. A tensor that was changed or replaced while it was held is
written home when it is let go; a read-only home that would lose the change is an error, never silence. A tensor that
somebody put in the placeholder's place (an assignment, `torch.func.functional_call`) is a guest: it is used for the call,
and stays, the same object, until whoever put it there takes it away.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acc_hooks import hooked
from acc_hooks.copying import again
from acc_hooks.elsewhere import settle
from acc_hooks.fetching import Fetched, Wanted, refuse_ahead
from acc_hooks.held import Held
from acc_hooks.holding import Holding, current_tensor
from acc_hooks.homes import add_statistics, outside_inference_mode
from acc_hooks.origin import Home, Loan, OffloadedWeightError, Source, refuse_twice, root_of
from acc_hooks.placeholder import (
    add_source,
    is_of_another,
    is_placeholder,
    kind_of,
    stand_in,
    without_class,
)
from acc_hooks.prefetch import Layer, Prefetcher
from acc_hooks.prefixed import home_of, lacks
from acc_hooks.resident import Residents
from acc_hooks.tensors import TiedParams, get_tensor, is_plain, new_like, owner_of, place, put_tensor
from acc_hooks.values import META, Slot, Values


class Answering(Source, Layer, Protocol):
    """Who knows the weights map of the tensors."""


class OffloadedTensors:
    """Placeholders in, real tensors in for the time of a `hold`, real tensors back for good.

    Holders are counted under a lock: a module that runs in two threads, or inside itself, is loaded once and let go by the
    last. A hold without a `holder` is the hand-made kind (`pre_forward` called by hand): the next `let_go` ends it.
    """

    def __init__(self, residents: Residents, path: str, prefetcher: Prefetcher | None = None) -> None:
        self._prefetcher = Prefetcher(0) if prefetcher is None else prefetcher
        self._values = Values(residents, path, self._prefetcher)
        self._number: int | None = None  # what the prefetcher calls this module
        self._source: weakref.ref[Answering] | None = None
        self._slots: dict[str, Slot] = {}
        self._holding: Holding
        self._holders: set[int]  # ids of those that are counted
        self._lock: AbstractContextManager[Any]
        self._forget_holds()

    @outside_inference_mode()
    def take(self, module: nn.Module, names: Collection[str], weights_map: Mapping[str, Tensor]) -> None:
        """Replace the named tensors by placeholders.

        ValueError when the map cannot give a tensor that would be lost, and for a tensor that is offloaded already.
        """
        for name in names:
            tensor = get_tensor(module, name)
            if is_placeholder(tensor) and not self._values.residents.is_placeholder(
                self._values.full(name), tensor
            ):
                raise refuse_twice(self._values.full(name))
            if tensor is not None and tensor.device.type != "meta" and lacks(weights_map, name):
                raise ValueError(
                    f"{self._values.full(name)} cannot be offloaded: the weights map has no entry "
                    f"{home_of(weights_map, name)[1]!r}; add it to the map"
                )
        try:
            for name in names:
                tensor = get_tensor(module, name)
                if tensor is not None:
                    self._slots[name] = self._take_one(module, name, tensor)
        except BaseException:
            self.give_back(module, weights_map, None)
            raise

    def names(self) -> Collection[str]:
        """What is offloaded, below the module."""
        return self._slots.keys()

    def answer_for(self, source: Answering) -> None:
        """Let `source` give and take the values behind the placeholders, and say what to fetch; also after a copy."""
        self._number = self._prefetcher.join(source, self._number)
        self._source = weakref.ref(source)
        for slot in self._slots.values():
            add_source(slot.placeholder, source)

    def held_placeholders(self) -> dict[int, Tensor]:
        """The placeholders of the tensors that are held now, by the tensor's id."""
        with self._lock:
            held = [
                (self._slots[name], held) for name, held in self._holding.held.items() if not held.is_guest
            ]
            return {id(held.tensor): slot.placeholder for slot, held in held}

    @outside_inference_mode()
    def value_behind(self, placeholder: Tensor, weights_map: Mapping[str, Tensor]) -> Tensor | None:
        """The real tensor of a placeholder, where it is kept; None for one of somebody else."""
        slot = self._slot_of(placeholder)
        if slot is None:
            return None
        value = self._values.newest(slot, weights_map)
        return self._values.placed(slot, value, value.device)

    def home_behind(self, placeholder: Tensor, weights_map: Mapping[str, Tensor]) -> Home | None:
        """Where the real tensor of a placeholder is kept; None for one of somebody else."""
        slot = self._slot_of(placeholder)
        return None if slot is None else self._values.home(slot, weights_map)

    @outside_inference_mode()
    def write_behind(self, placeholder: Tensor, value: Tensor, weights_map: Mapping[str, Tensor]) -> bool:
        """Bring a new value home for a placeholder; False for one of somebody else."""
        slot = self._slot_of(placeholder)
        if slot is None:
            return False
        refuse_ahead(slot.full)
        with self._lock:
            held = self._own_held(slot)
            if held is not None:  # it goes home when the module lets go
                with torch.no_grad():
                    held.tensor.copy_(value)
            else:
                self._values.keep(slot, value, None, weights_map)
        return True

    @outside_inference_mode()
    def lend(
        self, placeholder: Tensor, weights_map: Mapping[str, Tensor], device: torch.device | None
    ) -> Loan | None:
        """The real tensor of a placeholder on `device`, or the one that the module holds now; None for one of somebody else.

        ValueError without a device.
        """
        slot = self._slot_of(placeholder)
        if slot is None:
            return None
        refuse_ahead(slot.full)
        if device is None:
            raise ValueError(
                f"{slot.full} is offloaded and there is no device to compute on: give its hook an execution_device"
            )
        with self._lock:
            held = self._own_held(slot)
            if held is not None:  # its changes go home when the module lets go
                return Loan(tensor=held.tensor, settle=_nothing, end=_nothing, can_be_kept=False)
            copy = self._values.copy(slot, Fetched(value=self._values.read(slot, weights_map)), device, None)
        add_statistics(copy.tensor, slot.name, weights_map, device)
        is_buffer = kind_of(slot.placeholder) is Tensor
        look = (
            functools.partial(self._values.read, slot, weights_map) if is_buffer else None
        )  # as running statistics

        @outside_inference_mode()
        def settle() -> None:
            if copy.was_changed(look):
                with self._lock:
                    self._values.keep(slot, copy.tensor, copy, weights_map)

        release = contextlib.ExitStack()
        if slot.tie is not None:
            release.callback(self._values.residents.release, slot.tie, device)
        return Loan(tensor=copy.tensor, settle=settle, end=release.close, can_be_kept=True)

    @property
    def device_in_use(self) -> torch.device | None:
        """Where the tensors are while they are held, else None."""
        return self._holding.device if self._holding.held else None

    @outside_inference_mode()
    def hold(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        device: torch.device,
        tied_params_map: TiedParams | None = None,
        holder: object | None = None,
    ) -> None:
        """Put the real tensors on `device` into the module. Nothing stays loaded when it raises."""
        refuse_ahead(self._values.full(""))
        with self._lock:
            holding = self._holding
            if not holding.is_complete:  # an interrupt left it so
                self._put_back(module, weights_map, tied_params_map)
            elif holding.held and holding.device != device:
                if self._holders:
                    raise OffloadedWeightError(
                        f"{self._values.full('')} is in use on {holding.device}, its weights cannot be put on {device} now"
                    )
                self._put_back(module, weights_map, tied_params_map)
            if not holding.held:
                fetched: dict[str, Fetched] = {}
                if self._number is not None:
                    fetched = self._prefetcher.take(self._number, weights_map, device)
                holding.begin(module, self._slots, weights_map, device, tied_params_map, fetched)
                if self._number is not None:
                    self._prefetcher.look_ahead(self._number)
            if holder is not None:
                self._holders.add(id(holder))

    @outside_inference_mode()
    def let_go(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None = None,
        holder: object | None = None,
        compare: bool = False,
    ) -> None:
        """End a hold; the last one brings the placeholders back and changes home. `compare` finds changes made by `.data` too."""
        with self._lock:
            if holder is not None:
                self._holders.discard(id(holder))
            if not self._holders and (self._holding.held or not self._holding.is_complete):
                self._put_back(module, weights_map, tied_params_map, compare)

    @outside_inference_mode()
    def give_back(
        self, module: nn.Module, weights_map: Mapping[str, Tensor], tied_params_map: TiedParams | None
    ) -> None:
        """Put the real tensors back where they were before `take`, as ties again; those taken from meta stay there."""
        with self._lock:
            self._holders.clear()
            self._put_back(module, weights_map, tied_params_map)
            for slot in list(self._slots.values()):
                self._restore(module, slot, weights_map)
                if slot.tie is not None:
                    self._values.residents.forget_placeholder(slot.tie)
                del self._slots[slot.name]

    def wants_next(self, weights_map: Mapping[str, Tensor], device: torch.device) -> Wanted | None:
        """What the next hold will read, as far as the last one tells; None while it is there.

        Without the lock: the prefetcher asks with its own, which is taken inside of ours.
        """
        slots = [slot for slot in list(self._slots.values()) if slot.name not in self._holding.guests]
        if self._holding.held or not slots:
            return None
        plain = [slot.name for slot in slots if is_plain(slot.placeholder) and slot.tie is None]
        return Wanted(
            weights_map=weights_map,
            device=device,
            nbytes={slot.name: slot.nbytes for slot in slots},
            staged=frozenset(plain),
        )

    def fill(self, destination: dict[str, Any], prefix: str, weights_map: Mapping[str, Tensor]) -> None:
        """Replace the placeholders in a state dict by the real values, in the placeholder's dtype, where they are kept."""
        for slot in self._slots.values():
            entry = destination.get(prefix + slot.name)
            if not isinstance(entry, Tensor) or not entry.is_meta:
                continue
            if not is_placeholder(entry) or root_of(entry) is slot.placeholder:
                value = self._values.newest(slot, weights_map)
                destination[prefix + slot.name] = self._values.placed(slot, value, value.device).detach()

    def wants(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state dict may have something for the offloaded tensors.

        A module that loads in its own way, as batch norms do, may find a value for what the state dict lacks.
        """
        own = any("." not in name for name in self._slots)
        return any(prefix + name in state_dict for name in self._slots) or (own and _loads_by_itself(module))

    @property
    def is_block(self) -> bool:
        """Whether some of the tensors are below the module."""
        return any("." in name for name in self._slots)

    def _take_one(self, module: nn.Module, name: str, tensor: Tensor) -> Slot:
        full, residents = self._values.full(name), self._values.residents
        tie = residents.tie_of(full)

        def make() -> Tensor:
            return stand_in(place(tensor, None, META, name=full), full)

        placeholder = make() if tie is None else residents.placeholder(tie, make)
        put_tensor(*owner_of(module, name), placeholder)
        return Slot(
            name=name,
            full=full,
            placeholder=placeholder,
            tie=tie,
            original_device=tensor.device,
            nbytes=tensor.nbytes,
        )

    def _restore(self, module: nn.Module, slot: Slot, weights_map: Mapping[str, Tensor]) -> None:
        values, device, placeholder = self._values, slot.original_device, slot.placeholder

        @outside_inference_mode()
        def make() -> Tensor:
            if device.type == "meta":  # it was offloaded without a value
                return new_like(placeholder, without_class(placeholder))
            value = values.newest(slot, weights_map)
            if slot.tie is None:
                return values.placed(slot, value, device)
            return values.residents.settle(slot.tie, device, lambda: values.placed(slot, value, device))

        source = None if self._source is None else self._source()
        owner, leaf = owner_of(module, slot.name)
        current = current_tensor(owner, leaf)
        settled = settle(placeholder, source, make)  # for who has the placeholder under another name
        if current is None or not current.is_meta or is_of_another(current, placeholder):
            return
        if device.type != "meta" or current is placeholder:
            put_tensor(owner, leaf, settled())

    def _put_back(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None,
        compare: bool = False,
    ) -> None:
        self._holding.end(module, self._slots, weights_map, tied_params_map, compare)

    def _own_held(self, slot: Slot) -> Held | None:
        """What the module holds of this weight now; None for a guest, too."""
        held = self._holding.held.get(slot.name)
        return None if held is None or held.is_guest else held

    def _slot_of(self, placeholder: Tensor) -> Slot | None:
        return next((slot for slot in self._slots.values() if slot.placeholder is placeholder), None)

    def _forget_holds(self) -> None:
        self._holding = Holding(self._values)
        self._holders = set()
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        slots = {
            name: replace(slot, placeholder=again(slot.placeholder)) for name, slot in self._slots.items()
        }
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_holding", "_holders", "_lock")}
        return {**kept, "_slots": slots, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_holds()


def _loads_by_itself(module: nn.Module) -> bool:
    """Whether somebody's own code takes part when the module's own tensors are loaded from a state dict."""
    own = (cls for cls in type(module).__mro__ if cls not in (nn.Module, hooked.Hooked))
    return bool(module._load_state_dict_pre_hooks) or any("_load_from_state_dict" in vars(cls) for cls in own)


def _nothing() -> None:
    """A tensor that the module holds needs no care of ours."""
