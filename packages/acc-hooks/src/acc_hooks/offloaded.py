"""The tensors of one module that live in a weights map, and on the module only while they are used.

See resident.py for what a placeholder, a home and a copy are. A tensor that was changed or replaced while it was held is
written home when it is let go; a read-only home that would lose the change is an error, never silence.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .prefixed import innermost, is_writable, lacks
from .resident import Residents
from .tensors import TiedParams, get_tensor, is_plain, owner_of, place, put_tensor


class OffloadedWeightError(RuntimeError):
    """A weight that is offloaded was asked for something only a weight that stays can do."""


@dataclass(kw_only=True)
class _Slot:
    name: str  # below the hooked module
    placeholder: Tensor
    tie: str | None
    original_device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Held:
    tensor: Tensor
    version: int | None  # None: inference tensors do not count their changes
    value: Tensor  # what the weights map gave
    pointer: int | None  # our entry in tied_params_map, to be dropped again


class OffloadedTensors:
    """Placeholders in, real tensors in for the time of a `hold`, real tensors back for good.

    Holds are counted under a lock: a module that runs in two threads, or inside itself, is loaded once and let go by the
    last. A hold with `counted=False` is the hand-made kind (`pre_forward` called by hand): the next `let_go` ends it.
    """

    def __init__(self, residents: Residents, path: str) -> None:
        self._residents = residents
        self._path = path  # of the hooked module in the model, for messages and ties
        self._slots: dict[str, _Slot] = {}
        self._device: torch.device | None = None
        self._held: dict[str, _Held]
        self._holds: int
        self._lock: AbstractContextManager[Any]
        self._forget_holds()

    def take(self, module: nn.Module, names: Collection[str], weights_map: Mapping[str, Tensor]) -> None:
        """Replace the named tensors by placeholders. ValueError when the map cannot give a tensor that would be lost."""
        for name in names:
            tensor = get_tensor(module, name)
            if tensor is not None and tensor.device.type != "meta" and lacks(weights_map, name):
                raise ValueError(
                    f"{self._full(name)} cannot be offloaded: the weights map has no entry {name!r}; add it to the map"
                )
        try:
            for name in names:
                tensor = get_tensor(module, name)
                if tensor is not None:
                    self._slots[name] = self._take_one(module, name, tensor)
        except BaseException:
            self.give_back(module, weights_map, None)
            raise

    @property
    def device_in_use(self) -> torch.device | None:
        """Where the tensors are while they are held, else None."""
        return self._device if self._held else None

    def hold(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        device: torch.device,
        tied_params_map: TiedParams | None = None,
        counted: bool = True,
    ) -> None:
        """Put the real tensors on `device` into the module. Nothing stays loaded when it raises."""
        with self._lock:
            if self._held and self._device != device:
                if self._holds:
                    raise OffloadedWeightError(
                        f"{self._full('')} is in use on {self._device}, its weights cannot be put on {device} now"
                    )
                self._put_back(module, weights_map, tied_params_map, compare=False)
            if not self._held:
                self._fetch(module, weights_map, device, tied_params_map)
            self._holds += counted

    def let_go(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None = None,
        counted: bool = True,
        compare: bool = False,
    ) -> None:
        """End a hold; the last one brings the placeholders back and changes home. `compare` finds changes made by `.data` too."""
        with self._lock:
            self._holds -= counted
            if self._holds == 0 and self._held:
                self._put_back(module, weights_map, tied_params_map, compare)

    def give_back(
        self, module: nn.Module, weights_map: Mapping[str, Tensor], tied_params_map: TiedParams | None
    ) -> None:
        """Put the real tensors back where they were before `take`, as ties again; those taken from meta stay there."""
        with self._lock:
            self._holds = 0
            if self._held:
                self._put_back(module, weights_map, tied_params_map, compare=False)
            for slot in list(self._slots.values()):
                self._restore(module, slot, weights_map)
                if slot.tie is not None:
                    self._residents.forget_placeholder(slot.tie)
                del self._slots[slot.name]

    def fill(self, destination: dict[str, Any], prefix: str, weights_map: Mapping[str, Tensor]) -> None:
        """Replace the placeholders in a state dict by the real values, in the placeholder's dtype, where they are kept."""
        for slot in self._slots.values():
            entry = destination.get(prefix + slot.name)
            if isinstance(entry, Tensor) and entry.device.type == "meta":
                value = self._value(slot, weights_map)
                destination[prefix + slot.name] = place(
                    slot.placeholder, value, value.device, name=self._full(slot.name)
                ).detach()

    def store_below(
        self, state_dict: Mapping[str, Any], prefix: str, weights_map: Mapping[str, Tensor]
    ) -> None:
        """Take the values of submodules' tensors from a state dict that torch would copy into placeholders, to no effect."""
        for slot in self._slots.values():
            new = state_dict.get(prefix + slot.name) if "." in slot.name else None
            if isinstance(new, Tensor) and new.shape == slot.placeholder.shape:
                self._store(slot, new, None, weights_map)

    def wants(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state dict has something for the module's own offloaded tensors."""
        return any(prefix + name in state_dict for name in self._slots if "." not in name)

    def _take_one(self, module: nn.Module, name: str, tensor: Tensor) -> _Slot:
        tie = self._residents.tie_of(self._full(name))

        def make() -> Tensor:
            return place(tensor, None, torch.device("meta"), name=self._full(name))

        placeholder = make() if tie is None else self._residents.placeholder(tie, make)
        put_tensor(*owner_of(module, name), placeholder)
        return _Slot(name=name, placeholder=placeholder, tie=tie, original_device=tensor.device)

    def _restore(self, module: nn.Module, slot: _Slot, weights_map: Mapping[str, Tensor]) -> None:
        device = slot.original_device
        current = get_tensor(module, slot.name)
        if device.type == "meta" or current is None or current.device.type != "meta":
            return
        value = self._value(slot, weights_map)

        def make() -> Tensor:
            return self._place(slot, value, device)

        new = make() if slot.tie is None else self._residents.settle(slot.tie, device, make)
        put_tensor(*owner_of(module, slot.name), new)

    def _fetch(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        device: torch.device,
        tied_params_map: TiedParams | None,
    ) -> None:
        self._device = device
        try:
            for slot in self._slots.values():
                owner, leaf = owner_of(module, slot.name)
                current = get_tensor(owner, leaf)
                if current is None:
                    continue
                if current is not slot.placeholder:
                    self._accept(module, slot, current, weights_map)
                held = self._copy(slot, self._value(slot, weights_map), device, tied_params_map)
                self._held[slot.name] = held
                put_tensor(owner, leaf, held.tensor)
                _add_statistics(held.tensor, slot.name, weights_map, device)
        except BaseException:
            self._put_back(module, weights_map, tied_params_map, compare=False)
            raise

    def _accept(
        self, module: nn.Module, slot: _Slot, current: Tensor, weights_map: Mapping[str, Tensor]
    ) -> None:
        """Somebody put another tensor there while the weight was offloaded: a value goes home, a placeholder is kept."""
        if not current.is_meta:
            self._store(slot, current, None, weights_map)
        self._stand_alone(slot, current)
        put_tensor(*owner_of(module, slot.name), slot.placeholder)

    def _stand_alone(self, slot: _Slot, tensor: Tensor) -> None:
        """The name no longer shares its tie's tensor: it was assigned one of its own."""
        slot.tie = None
        slot.placeholder = place(tensor, None, torch.device("meta"), name=self._full(slot.name))

    def _copy(
        self, slot: _Slot, value: Tensor, device: torch.device, tied_params_map: TiedParams | None
    ) -> _Held:
        pointer = None

        def make() -> Tensor:
            nonlocal pointer
            shared = None
            if tied_params_map and device.type != "meta" and value.device.type != "meta":
                shared = tied_params_map.get(value.data_ptr())
            if shared is not None and device in shared:
                return shared[device]
            tensor = self._place(slot, value, device)
            if tensor.requires_grad:
                tensor.register_hook(_Refuse(self._full(slot.name)))
            if shared is not None:
                shared[device] = tensor
                pointer = value.data_ptr()
            return tensor

        tensor = make() if slot.tie is None else self._residents.acquire(slot.tie, device, make)
        return _Held(
            tensor=tensor,
            version=None if tensor.is_inference() else tensor._version,
            value=value,
            pointer=pointer,
        )

    def _put_back(
        self,
        module: nn.Module,
        weights_map: Mapping[str, Tensor],
        tied_params_map: TiedParams | None,
        compare: bool,
    ) -> None:
        held_tensors, self._held = self._held, {}
        changed: list[tuple[_Slot, Tensor, _Held | None]] = []
        for name, held in held_tensors.items():
            slot = self._slots[name]
            owner, leaf = owner_of(module, name)
            current = get_tensor(owner, leaf)
            if slot.tie is not None and self._device is not None:
                self._residents.release(slot.tie, self._device)
            if current is held.tensor:
                # running statistics are written without being counted
                look = compare or (owner.training and leaf in owner._buffers)
                if self._changed(slot, held, weights_map, look):
                    changed.append((slot, current, held))
                if current.requires_grad != slot.placeholder.requires_grad:
                    slot.placeholder.requires_grad_(current.requires_grad)
            elif (
                current is not None and current is not slot.placeholder
            ):  # replaced: a value of its own from now on
                changed.append((slot, current, None))
                self._stand_alone(slot, current)
            put_tensor(owner, leaf, slot.placeholder)
            if held.pointer is not None and tied_params_map and self._device is not None:
                tied_params_map.get(held.pointer, {}).pop(self._device, None)
        for slot, tensor, kept in changed:
            self._store(slot, tensor, kept, weights_map)

    def _changed(self, slot: _Slot, held: _Held, weights_map: Mapping[str, Tensor], look: bool) -> bool:
        """Whether a tensor was written to; `look` compares it with its home, as writing by `.data` is not counted."""
        if held.version is not None and held.tensor._version != held.version:
            return True
        if not look or held.tensor.is_meta or held.value.is_meta:
            return False
        home = held.value
        if _same_memory(held.tensor, home):  # a change is in both: ask again
            home = self._value(slot, weights_map)
        return not _same_memory(held.tensor, home) and differs(held.tensor, home)

    def _store(
        self, slot: _Slot, tensor: Tensor, held: _Held | None, weights_map: Mapping[str, Tensor]
    ) -> None:
        """Bring a changed tensor home."""
        tensor = tensor.detach()
        device = torch.device("cpu")
        writable = is_writable(weights_map)
        if held is not None:
            home = self._value(slot, weights_map)
            if _same_memory(tensor, home):
                return  # it never left
            device = home.device
            keeps_object = home is held.value and home.dtype == tensor.dtype and home.shape == tensor.shape
            if keeps_object and writable and not home.is_inference():  # so that the map's own ties stay
                with torch.no_grad():
                    home.copy_(tensor)
                return
        if not writable:
            raise OffloadedWeightError(
                f"{self._full(slot.name)} was changed while it was loaded, but its weights come from a read-only "
                f"{type(innermost(weights_map)).__name__}: the change would be lost. Change the weights before "
                "offloading them, or offload to memory"
            )
        weights_map[slot.name] = tensor.to(device, copy=True)  # type: ignore[index]

    def _value(self, slot: _Slot, weights_map: Mapping[str, Tensor]) -> Tensor:
        try:
            return weights_map[slot.name]
        except KeyError:
            raise OffloadedWeightError(
                f"{self._full(slot.name)} is offloaded and its weights map ({type(innermost(weights_map)).__name__}) has "
                f"no entry {slot.name!r}"
            ) from None

    def _place(self, slot: _Slot, value: Tensor, device: torch.device) -> Tensor:
        return place(slot.placeholder, value, device, name=self._full(slot.name))

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self._path, name) if part) or "the module"

    def _forget_holds(self) -> None:
        self._held = {}
        self._holds = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_held", "_holds", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_holds()


class _Refuse:
    """Stops a backward pass that would leave a gradient on a copy nobody keeps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor) -> Tensor:  # noqa: ARG002
        raise OffloadedWeightError(
            f"{self._name} is offloaded: it cannot be trained, its gradient would be lost with the copy the forward used. "
            "Call requires_grad_(False) on the weights that are not trained, and keep those that are on their device"
        )


def differs(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors of the same dtype hold different bytes: NaN equals itself, float8 can be compared."""
    if not is_plain(tensor) or not is_plain(value) or tensor.dtype != value.dtype:
        return False
    tensor, value = tensor.detach(), value.detach()
    return tensor.shape != value.shape or not torch.equal(_bytes(tensor.to(value.device)), _bytes(value))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    if tensor.device != other.device or tensor.is_meta or not (is_plain(tensor) and is_plain(other)):
        return False
    return (
        tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.dtype == other.dtype
    )


def _add_statistics(
    tensor: Tensor, name: str, weights_map: Mapping[str, Tensor], device: torch.device
) -> None:
    """The statistics of an 8-bit weight are kept under its name with SCB for `weight`."""
    if tensor.dtype == torch.int8 and name.split(".")[-1] == "weight":
        statistics = name[: -len("weight")] + "SCB"
        if statistics in weights_map:
            tensor.SCB = weights_map[statistics].to(device)  # type: ignore[attr-defined]
