"""What a module holds in the place of a placeholder during a call: a copy from the weights map, or a guest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from acc_hooks.borrowing import real_value
from acc_hooks.homes import differs, same_memory, version_of
from acc_hooks.origin import OffloadedWeightError
from acc_hooks.placeholder import is_of_another, is_placeholder
from acc_hooks.tensors import is_plain


@dataclass(frozen=True, kw_only=True)
class Held:
    tensor: Tensor
    version: int | None  # None: inference tensors do not count their changes
    value: Tensor  # what the weights map gave, or the guest
    tie: str | None = None  # whose counted copy it is
    pointer: int | None = None  # our entry in tied_params_map, to be dropped again
    is_guest: bool = False  # `value` is what the module held in the place of the placeholder

    def was_changed(self, read: Callable[[], Tensor] | None) -> bool:
        """Whether the tensor was written to.

        With `read`, which gives what the map has now, it is compared with it: writing by `.data` is not counted.
        """
        if self.version is not None and self.tensor._version != self.version:
            return True
        if read is None or self.tensor.is_meta or self.value.is_meta:
            return False
        home = read() if same_memory(self.tensor, self.value) else self.value  # else a change is in both
        if is_plain(self.tensor) and is_plain(home):
            home = home.to(self.tensor.dtype)  # as the fetch did
        return not same_memory(self.tensor, home) and differs(self.tensor, home)


def is_guest(tensor: Tensor, placeholder: Tensor, full: str) -> bool:
    """Whether `tensor`, which the module holds, has values that are not those of its weight `full`."""
    if tensor is placeholder:
        return False
    if tensor.is_meta and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise OffloadedWeightError(
            f"{full} is offloaded, and a transform of torch.func wrapped what stands in for it: call the transform "
            "with real values, such as those of model.state_dict()"
        )
    return not tensor.is_meta or is_of_another(tensor, placeholder)


def host(guest: Tensor, device: torch.device) -> Held:
    """A guest on `device` for a forward, the same object if it is there; gradients reach it.

    The placeholder of another weight is a guest with the values of that weight.
    """
    tensor = real_value(guest) if is_placeholder(guest) else guest
    if tensor.device != device:
        tensor = tensor.to(device)
    return Held(tensor=tensor, version=version_of(tensor), value=guest, is_guest=True)


def see_off(held: Held, is_written_unseen: bool) -> Tensor:
    """The guest, with what the forward wrote to its copy."""
    guest = held.value
    if held.tensor is not guest and (is_written_unseen or version_of(held.tensor) != held.version):
        with torch.no_grad():
            guest.copy_(held.tensor)
    return guest
