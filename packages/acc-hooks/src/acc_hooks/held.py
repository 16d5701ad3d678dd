"""What a module holds in the place of a placeholder during a call: a copy from the weights map, or a guest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acc_hooks.homes import version_of


@dataclass(frozen=True, kw_only=True)
class Held:
    tensor: Tensor
    version: int | None  # None: inference tensors do not count their changes
    value: Tensor  # what the weights map gave
    pointer: int | None = None  # our entry in tied_params_map, to be dropped again
    guest: Tensor | None = None  # what the module held in the place of the placeholder


def host(guest: Tensor, device: torch.device) -> Held:
    """A guest on `device` for a forward, the same object if it is there; gradients reach it."""
    tensor = guest if guest.device == device else guest.to(device)
    return Held(tensor=tensor, version=version_of(tensor), value=guest, guest=guest)


def see_off(held: Held, is_written_unseen: bool) -> Tensor:
    """The guest, with what the forward wrote to its copy."""
    guest = held.value
    if held.tensor is not guest and (is_written_unseen or version_of(held.tensor) != held.version):
        with torch.no_grad():
            guest.copy_(held.tensor)
    return guest
