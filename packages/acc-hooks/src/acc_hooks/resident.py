"""One counted copy of a tied tensor per device, whichever of its names is used.

[Note: placeholder, home, copy]
    placeholder   the meta tensor a module holds while a weight is offloaded; one for all names of a tie
    home          where the real value is kept: an entry of the weights map
    copy          the value on the execution device while a forward uses it; one per tie and device, counted
    resident      the tensor of a name of the same tie that is not offloaded: serves as the copy wherever it lives
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.copying import again
from acc_hooks.homes import differs, read_home
from acc_hooks.tensors import owner_of, put_tensor
from acc_hooks.ties import every_tensor, group_by_tensor


class Residents:
    """The ties of one model, shared by the hooks of one attach call; knows names by their full path."""

    def __init__(self, groups: Iterable[Sequence[str]] = ()) -> None:
        self._names = {names[0]: list(names) for names in groups}
        self._tie = {name: tie for tie, names in self._names.items() for name in names}
        self._placeholders: dict[str, Tensor] = {}
        self._forget_copies()

    def tie_of(self, name: str) -> str | None:
        """What to ask the other methods with, None for a tensor that is tied to no other."""
        return self._tie.get(name)

    def names_of(self, tie: str) -> list[str]:
        """Every name of a tie."""
        return self._names[tie]

    def leave(self, name: str) -> None:
        """This name has a tensor of its own from now on."""
        with self._lock:
            names = self._names.get(self._tie.pop(name, ""), [])
            if name in names:
                names.remove(name)

    def is_placeholder(self, name: str, tensor: Tensor | None) -> bool:
        """Whether this is the placeholder of the tie that has this name."""
        tie = self._tie.get(name)
        return tie is not None and self._placeholders.get(tie) is tensor

    def placeholder(self, tie: str, make: Callable[[], Tensor]) -> Tensor:
        """The one placeholder of a tie."""
        with self._lock:
            return self._placeholders.setdefault(tie, make())

    def forget_placeholder(self, tie: str) -> None:
        """The tie is no longer offloaded."""
        with self._lock:
            self._placeholders.pop(tie, None)

    def settle(self, tie: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of this tie that stays on `device`: the one already there, else a new one, remembered weakly."""
        with self._lock:
            tensor = self._resident(tie, device)
            if tensor is None:
                tensor = make()
                self._residents[tie, device] = weakref.ref(tensor)
            return tensor

    def stays(self, tie: str, tensor: Tensor) -> None:
        """A name of this tie keeps its tensor."""
        self.settle(tie, tensor.device, lambda: tensor)

    def acquire(
        self, tie: str, device: torch.device, make: Callable[[], Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The copy of this tie on `device`, made if there is none, for as long as somebody has not called `release`.

        A resident of another `dtype` (a casting hook stores it small) does not serve as the copy.
        """
        with self._lock:
            resident = self._resident(tie, device)
            if resident is not None and dtype not in (None, resident.dtype):
                resident = None
            entry = self._copies.get((tie, device))
            if entry is None:
                entry = self._copies[tie, device] = [0, make() if resident is None else resident]
            entry[0] += 1
            return entry[1]

    def release(self, tie: str, device: torch.device) -> None:
        """One user less; the last one frees the copy."""
        with self._lock:
            entry = self._copies.get((tie, device))
            if entry is None:  # an interrupt had it released twice
                return
            entry[0] -= 1
            if entry[0] == 0:
                del self._copies[tie, device]

    def rejoin(self, module: nn.Module) -> None:
        """The hooks are gone: the names of a tie that are on several devices get one tensor again, that of the first."""
        tensors = dict(every_tensor(module))
        for tie, names in self._names.items():
            staying = {id(tensor) for tensor in self._staying(tie)}
            mine = [name for name in names if id(tensors.get(name)) in staying]
            for name in mine[1:]:
                put_tensor(*owner_of(module, name), tensors[mine[0]])

    def refresh(self, tie: str, value: Tensor) -> None:
        """Write a new value to the names of the tie that stay on a device."""
        for tensor in self._staying(tie):
            if tensor.data_ptr() != value.data_ptr():
                with torch.no_grad():
                    tensor.copy_(value)

    def resident_of(self, tie: str) -> Tensor | None:
        """The tensor of a name that stays, on whichever device."""
        return next(iter(self._staying(tie)), None)

    def _staying(self, tie: str) -> list[Tensor]:
        with self._lock:
            found = [self._resident(*key) for key in self._residents if key[0] == tie]
        return [tensor for tensor in found if tensor is not None and not tensor.is_meta]

    def _resident(self, tie: str, device: torch.device) -> Tensor | None:
        reference = self._residents.get((tie, device))
        tensor = None if reference is None else reference()
        return tensor if tensor is not None and tensor.device == device else None

    def _forget_copies(self) -> None:
        self._copies: dict[tuple[str, torch.device], list[Any]] = {}
        self._residents: dict[tuple[str, torch.device], weakref.ref[Tensor]] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        placeholders = {tie: again(tensor) for tie, tensor in self._placeholders.items()}
        with self._lock:
            residents = [(tie, self._resident(tie, device)) for tie, device in self._residents]
        return {
            "_names": self._names,
            "_tie": self._tie,
            "_placeholders": placeholders,
            "residents": [(tie, tensor) for tie, tensor in residents if tensor is not None],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        residents = state.pop("residents")
        self.__dict__.update(state)
        self._forget_copies()
        for tie, tensor in residents:
            self.stays(tie, tensor)


def find_residents(module: nn.Module, away: Collection[str], weights_map: Mapping[str, Tensor]) -> Residents:
    """The ties of a hook that is made by hand and offloads `away`, also with names below that stay where they are.

    Those are left out where the weights map has another value: then they are two weights from now on.
    """
    every, taken = dict(every_tensor(module)), set(away)
    groups: list[list[str]] = []
    staying: dict[str, Tensor] = {}  # by tie
    for names in group_by_tensor(every.items()):
        mine = [name for name in names if name in taken]
        others = [every[name] for name in names if name not in taken and not every[name].is_meta]
        if mine and others:
            value = read_home(weights_map, mine[0], mine[0])
            if differs(value.to(others[0]), others[0]):
                names = mine
            else:
                staying[names[0]] = others[0]
        if len(names) > 1:
            groups.append(names)
    residents = Residents(groups)
    for tie, tensor in staying.items():
        residents.stays(tie, tensor)
    return residents
