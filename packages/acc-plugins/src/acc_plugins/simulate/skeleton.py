"""A model without its values: the same modules over tensors of the meta device, and later over tensors that only pretend to have memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.ties import replace_tensors


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

    def with_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        empty = torch.empty_like(tensor.detach(), device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty

    replace_tensors(model, with_memory)
