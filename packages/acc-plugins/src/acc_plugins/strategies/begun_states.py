"""State that an optimizer makes when it is built, told in a few numbers, so that it can be made again in another shape or on another rank.

Adagrad has one sum for each number of a parameter, and all are the same before its first step. What steps have left is not like that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from acc_ops.world import World


@dataclass(frozen=True)
class Same:
    """A tensor in which every number is `number`. `shape` and `device_type` are its own, None for those of the parameter."""

    number: Any
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    device_type: str | None = None


def summary_of(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
    """What is kept for a parameter of that shape, in a few numbers; None where that is not possible."""
    made: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            if value.is_meta or not value.numel() or bool((value != value.flatten()[0]).any()):
                return None
            number = value.flatten()[0].item()
            own = () if value.shape == shape else (tuple(value.shape), value.device.type)
            made[name] = Same(number, value.dtype, *own)
        elif value is None or isinstance(value, (bool, int, float, str)):
            made[name] = value
        else:
            return None
    return made


def filled(value: Any, like: Tensor) -> Any:
    """The tensor that a `Same` tells, for the parameter `like`; anything else as it is."""
    if not isinstance(value, Same):
        return value
    if value.shape is None:
        return torch.full(like.shape, value.number, dtype=value.dtype, device=like.device)
    return torch.full(value.shape, value.number, dtype=value.dtype, device=value.device_type)


def give_values(optimizers: Sequence[Optimizer], world: World) -> None:
    """States that were made on the meta device get rank 0's numbers, where every number of one is the same. Every rank calls it.

    They take no memory: each is one number, expanded. Raises ValueError on every rank for a state that has more to tell.
    """
    if world.size == 1 or not any(optimizer.state for optimizer in optimizers):
        return
    empty = any(
        _is_empty(t) for optimizer in optimizers for s in optimizer.state.values() for t in s.values()
    )
    if not any(world.comm.all_gather_object(empty)):
        return
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [
        optimizer.state.get(p, {})
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    mine = [summary_of(state, p.shape) for p, state in zip(parameters, states, strict=True)]
    told = world.comm.broadcast_object(mine)
    if None in told:
        raise ValueError(
            "an optimizer has made steps, or has state without values, while parameters of some ranks are on the meta device: prepare it before its "
            "first step, and load what was saved afterwards (load_state)"
        )
    for state, numbers in zip(states, told, strict=True):
        for name, value in state.items():
            if _is_empty(value):
                same: Same = numbers[name]
                one = torch.full((), same.number, dtype=same.dtype)
                state[name] = one.expand(value.shape)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
