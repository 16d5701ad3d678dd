"""The values behind the placeholders of one module: read from the weights map, copied to a device, brought home.

See resident.py for what a placeholder, a home and a copy are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acc_hooks.borrowing import drop_kept, forget
from acc_hooks.fetching import Fetched
from acc_hooks.held import Held
from acc_hooks.homes import others_that_differ, read_home, version_of, write_home, write_others
from acc_hooks.origin import Home, RefuseGradient
from acc_hooks.placeholder import is_placeholder, stand_in
from acc_hooks.prefetch import Prefetcher
from acc_hooks.prefixed import home_of
from acc_hooks.resident import Residents
from acc_hooks.tensors import TiedParams, is_plain, place, shared_copies

META = torch.device("meta")


@dataclass(kw_only=True)
class Slot:
    """One offloaded tensor."""

    name: str  # below the hooked module
    full: str  # in the model, for messages and ties
    placeholder: Tensor
    tie: str | None
    original_device: torch.device
    nbytes: int  # when it was taken


class Values:
    """Reading, copying and writing; who holds what is not its affair."""

    def __init__(self, residents: Residents, path: str, prefetcher: Prefetcher) -> None:
        self.residents = residents
        self._path = path  # of the hooked module in the model, for messages and ties
        self._prefetcher = prefetcher

    def full(self, name: str) -> str:
        """A name below the module as the model knows it."""
        return ".".join(part for part in (self._path, name) if part) or "the module"

    def read(self, slot: Slot, weights_map: Mapping[str, Tensor]) -> Tensor:
        """What the map has."""
        with self._prefetcher.reading():
            return read_home(weights_map, slot.name, slot.full)

    def home(self, slot: Slot, weights_map: Mapping[str, Tensor]) -> Home:
        """Where `newest` finds it."""
        resident = None if slot.tie is None else self.residents.resident_of(slot.tie)
        return home_of(weights_map, slot.name) if resident is None else resident

    def newest(self, slot: Slot, weights_map: Mapping[str, Tensor]) -> Tensor:
        """What the map has, or the name of its tie that stays on a device: somebody may have trained that one."""
        resident = None if slot.tie is None else self.residents.resident_of(slot.tie)
        return self.read(slot, weights_map) if resident is None else resident

    def placed(self, slot: Slot, value: Tensor, device: torch.device) -> Tensor:
        """A value on `device` as a tensor that can take the placeholder's place."""
        if not is_plain(slot.placeholder) or not is_plain(value):
            return place(slot.placeholder, value, device, name=slot.full)
        with torch._C.DisableTorchFunctionSubclass():  # a placeholder's metadata is dear otherwise
            return place(slot.placeholder, value, device, name=slot.full)

    def copy(
        self, slot: Slot, found: Fetched, device: torch.device, tied_params_map: TiedParams | None
    ) -> Held:
        """The value on `device`, as the module is to hold it; that of a tie is counted in `residents`."""
        pointer, value = None, found.value

        def make() -> Tensor:
            nonlocal pointer
            shared = None
            if tied_params_map and device.type != "meta":
                shared = shared_copies(tied_params_map, value)
            if shared is not None and device in shared:
                return shared[device]
            source = value if found.staged is None else found.staged
            source = source.clone() if source.is_inference() else source
            try:
                tensor = self.placed(slot, source, device)
            except torch.OutOfMemoryError:
                if not drop_kept():
                    raise
                tensor = self.placed(slot, source, device)
            if tensor.requires_grad:
                if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
                    tensor = _not_cached_by_autocast(tensor)
                tensor.register_hook(RefuseGradient(slot.full))
            if shared is not None:
                shared[device] = tensor
                pointer = value.data_ptr()
            return tensor

        if slot.tie is None:
            tensor = make()
        else:
            tensor = self.residents.acquire(slot.tie, device, make, slot.placeholder.dtype)
        return Held(tensor=tensor, version=version_of(tensor), value=value, pointer=pointer, tie=slot.tie)

    def keep(self, slot: Slot, tensor: Tensor, held: Held | None, weights_map: Mapping[str, Tensor]) -> None:
        """Bring a changed tensor home, under every name of its tie."""
        self._prefetcher.forget()
        forget(slot.placeholder)
        tensor = tensor.detach()
        full = slot.full
        write_home(weights_map, slot.name, full, tensor, None if held is None else held.value)
        if slot.tie is None:
            return
        write_others(weights_map, self._path, self._others(slot), self.read(slot, weights_map))
        self.residents.refresh(slot.tie, tensor)

    def is_another_elsewhere(self, slot: Slot, tensor: Tensor, weights_map: Mapping[str, Tensor]) -> bool:
        """Whether the map has another value under another name of the tie: a map may keep each name by itself."""
        names = () if slot.tie is None else self._others(slot)
        return any(True for _ in others_that_differ(weights_map, self._path, names, tensor))

    def stand_alone(self, slot: Slot, tensor: Tensor) -> None:
        """The name no longer shares its tie's tensor: it was assigned one of its own."""
        if slot.tie is not None:
            self.residents.leave(slot.full)
            slot.tie = None
        plain = place(tensor, None, META, name=slot.full)
        like = slot.placeholder if is_placeholder(slot.placeholder) else None
        slot.placeholder = stand_in(plain, slot.full, like=like)

    def _others(self, slot: Slot) -> list[str]:
        return [name for name in self.residents.names_of(slot.tie or "") if name != slot.full]


def _not_cached_by_autocast(parameter: Tensor) -> Tensor:
    """The same as a view: autocast keeps its copy of each leaf that wants a gradient and is no view, of every fetch one."""
    if type(parameter) is not nn.Parameter:
        return parameter
    with torch.no_grad():
        view = parameter.detach().view_as(parameter)
    view.__class__ = nn.Parameter
    view.__dict__.update(vars(parameter))
    return view.requires_grad_()
