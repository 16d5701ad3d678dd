"""A model without its values: the same modules over tensors of the meta device, and later over tensors that only pretend to have memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def meta_copy(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of `model` (or what the function `model` makes) on the meta device; ties stay ties, and the model is not changed.

    Raises TypeError for anything else.
    """
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"simulate needs a module, or a function that makes one, got {model!r}")
        with torch.device("meta"):
            model = model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"simulate was given a function that made no module but {model!r}")
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


def give_memory(model: nn.Module) -> None:
    """Replace tensors on the meta device by empty ones on the CPU, ties kept. Under FakeTensorMode they take no memory either."""
    made: dict[int, Tensor] = {}

    def filled(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor.detach(), device="cpu")
        return made[id(tensor)]

    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                fresh = made.get(id(parameter))
                if fresh is None:
                    fresh = nn.Parameter(filled(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fresh
                module._parameters[name] = fresh  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = filled(buffer)
