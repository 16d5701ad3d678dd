"""Rank 0's buffers on every rank, for strategies whose engine leaves that alone: running statistics are of one model, not of each rank's samples.

[Note: which buffers are sent] All that a state dict holds, of models in training, as DistributedDataParallel does it. Nothing tells which of them
a step has changed: torch does not count what batch_norm writes into its statistics as a change. What no state dict holds is made anew from the
model's options and is the same everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from acc_ops.world import World
from acc_plugins.strategies.replicated import take_from_rank_0


class SharedBuffers:
    """The saved buffers of models that are trained, equal on the ranks of `world`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self, model: nn.Module) -> None:
        """From now on; every rank has the same in them now."""
        owners = [weakref.ref(module) for module in model.modules() if saved_buffers(module)]
        if owners and self._world.size > 1:
            self._owners[model] = owners

    def share(self, held: Callable[[nn.Module], Any]) -> None:
        """Give those of watched models in training rank 0's values, but for models that are `held`. Every rank calls it alike."""
        buffers: dict[int, Tensor] = {}
        for model, refs in self._owners.items():
            if model.training and not held(model):
                owners = [module for ref in refs if (module := ref()) is not None]
                buffers.update({id(buffer): buffer for module in owners for buffer in saved_buffers(module)})
        if buffers:
            take_from_rank_0(self._world, list(buffers.values()))

    def clear(self) -> None:
        """Watch nothing any more."""
        self._owners.clear()


def saved_buffers(module: nn.Module) -> list[Tensor]:
    """Of this module itself, those that its state dict holds."""
    own = module._buffers.items()
    return [b for name, b in own if b is not None and name not in module._non_persistent_buffers_set]
