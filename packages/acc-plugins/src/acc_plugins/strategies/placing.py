"""A model on its device: moved if it must, left alone if it is there or has places of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move `model` to `device`; the same object back. A model that is there, or that is spread by a device map, is not touched.

    Raises ValueError for a weight on the meta device: there is nothing to move.
    """
    if is_dispatched(model):
        return model
    off_device = False
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} of {type(model).__name__} is on the meta device and has no values, so the model cannot be placed on {device}: "
                "load its weights first (acc_bigmodel.load_checkpoint_and_dispatch), or turn placing off (device_placement=False)"
            )
        off_device = off_device or not _on(tensor.device, device)
    return model.to(device) if off_device else model


def follow(optimizers: Iterable[Optimizer], before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Let `optimizers` train the parameters `after` where they had those `before`: some devices cannot move a parameter in place."""
    moved = {id(old): new for old, new in zip(before, after, strict=True) if old is not new}
    if not moved:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [moved.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in moved]:
            optimizer.state[moved[id(old)]] = optimizer.state.pop(old)


def is_dispatched(model: nn.Module) -> bool:
    """Whether a device map spread `model` over several places, or left it on disk."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return len(places) > 1 or "disk" in places


def _on(here: torch.device, wanted: torch.device) -> bool:
    return here == wanted or (here.type == wanted.type and wanted.index is None)
