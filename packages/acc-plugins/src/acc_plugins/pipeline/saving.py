"""A pipeline and its optimizer as one object to save: by the names of the whole model, so that other stages can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from acc_plugins.pipeline.pipelined import Pipelined


class PipelineState:
    """What `Pipelined.with_optimizer` gives: `accelerator.register_for_checkpointing` takes it, or torch.save its `state_dict()`.

    Every rank calls both methods.
    """

    def __init__(self, pipe: Pipelined, optimizer: Optimizer) -> None:
        self.pipe = pipe
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 of each pipeline `model`, `optimizer` (the state of each weight by name) and `options` (those of the first rank's groups, in order), in CPU
        memory; {} on the other ranks."""
        model = self.pipe.whole_state_dict()
        names = self._names()
        mine = {
            names[p]: tree_map_only(Tensor, lambda t: t.detach().cpu(), dict(self.optimizer.state[p]))
            for p in names
            if p in self.optimizer.state
        }
        told = self.pipe.tell_first(mine)
        if not model:
            return {}
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        states = {name: state for one in reversed(told) for name, state in one.items()}
        return {"model": model, "optimizer": states, "options": options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give weights and optimizer what `state_dict` had on rank 0; other stages, and another number of them, take their part.

        Raises KeyError or ValueError, before anything is changed, for missing weights and another number of groups.
        """
        if len(state["options"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the saved optimizer has {len(state['options'])} groups, this one has {len(self.optimizer.param_groups)}"
            )
        self.pipe.load_state_dict(state["model"])
        for group, options in zip(self.optimizer.param_groups, state["options"], strict=True):
            group.update(options)
        twins = self.pipe.names_by_weight()
        for p in self._names():
            known = next((state["optimizer"][name] for name in twins[p] if name in state["optimizer"]), None)
            if known is None:
                self.optimizer.state.pop(p, None)
                continue
            self.optimizer.state[p] = {
                key: value.to(p.device, copy=True)
                if isinstance(value, Tensor) and value.dim()
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for key, value in known.items()
            }

    def _names(self) -> dict[torch.nn.Parameter, str]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {p: name for name, p in self.pipe.named_parameters() if id(p) in held}


def gathered_on_first(value: Any, group: Any, place: int, size: int) -> list[Any]:
    """Every rank's `value` on the first rank of the group, in order; [] on the others."""
    told: list[Any] | None = [None] * size if place == 0 else None
    dist.gather_object(value, told, dst=dist.get_global_rank(group, 0), group=group)
    return told or []
