"""Optimizers while their models are sharded: they let go of the old parameters before, and get the new ones afterwards.

[Note: why placeholders] An optimizer that was built before `prepare` holds every whole weight. Kept until the last unit is sharded they would cost a
second model's memory. So a placeholder stands for each while `fully_shard` frees them unit by unit; it knows the module and the name, and whatever
is there afterwards takes its place, also when sharding failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acc_plugins.states.spread import is_dtensor
from acc_plugins.strategies.clip import local_part
from acc_plugins.strategies.same_start import sharded_like


class _Placeholder:
    """Stands for the parameter `name` of `module`; `shape` is that of the old one."""

    def __init__(self, module: nn.Module, name: str, shape: torch.Size) -> None:
        self.module, self.name, self.shape = module, name, shape

    @property
    def parameter(self) -> Tensor:
        """The one that is there now."""
        found: Tensor = self.module._parameters[self.name]  # type: ignore[assignment]
        return found


@contextmanager
def letting_go(optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> Iterator[None]:
    """Around sharding `models`: the optimizers hold none of their parameters inside, and their present ones afterwards, state included."""
    known = list(optimizers)
    places: dict[int, _Placeholder] = {}
    for model in models:
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in places:
                    places[id(p)] = _Placeholder(module, name, p.shape)
    for optimizer in known:
        _swap(optimizer, lambda p: places.get(id(p), p))
    try:
        yield
    finally:
        for optimizer in known:
            _swap(optimizer, lambda p: p.parameter if isinstance(p, _Placeholder) else p)


def follow_shards(optimizer: Optimizer, became: Mapping[Tensor, Tensor]) -> None:
    """Let an optimizer that still holds parameters of before train those that they `became`."""
    _swap(optimizer, lambda p: became.get(p, p))


def _swap(optimizer: Optimizer, other: Any) -> None:
    """Put `other(parameter)` into the place of every parameter, in the groups and in the state."""
    for group in optimizer.param_groups:
        for at, old in enumerate(group["params"]):
            new = other(old)
            if new is not old:
                group["params"][at] = new
                if old in optimizer.state:
                    optimizer.state[new] = _state_of(new, old.shape, optimizer.state.pop(old))


def _state_of(new: Any, shape: torch.Size, state: Mapping[str, Any]) -> Any:
    """The state of one parameter, sharded as `new` is; what has another shape (a count) stays."""
    if not isinstance(new, Tensor):
        return state
    if not is_dtensor(new):  # it stays whole, and so does what `give_values` made of one number
        return {name: value.clone() if _is_expanded(value) else value for name, value in state.items()}
    return {
        name: sharded_like(value, new, local_part(new).device)
        if isinstance(value, Tensor) and value.shape == shape and not is_dtensor(value)
        else value
        for name, value in state.items()
    }


def _is_expanded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and 0 in value.stride()
