"""Activation checkpointing: a block keeps its inputs only, and computes again in backward what it needs.

[Note: why around the forward] A block stays the same object with the same names: no wrapper module is put into the model, so state dicts and optimizers
see nothing of it. Random numbers are the same the second time, else dropout would give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from acc_plugins.precisions.forward import Nested, around_of, surround_inside


@dataclass(frozen=True)
class Checkpointed:
    """Runs a forward under torch's checkpoint; `offload` keeps its inputs in CPU memory until backward, pinned where `pin`."""

    offload: bool = False
    pin: bool = False

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kept = torch.autograd.graph.save_on_cpu(pin_memory=self.pin) if self.offload else nullcontext()
        with kept:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpoint_block(block: nn.Module, *, offload: bool = False) -> nn.Module:
    """Let `block` compute again in backward; the same object back, once however often it is asked for."""
    around = around_of(block)
    inside = around.inner if isinstance(around, Nested) else around
    if isinstance(inside, Checkpointed):
        return block
    pin = offload and torch.accelerator.is_available()
    return surround_inside(block, Checkpointed(offload, pin))
