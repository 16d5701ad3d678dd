"""The mean of a loss over a sequence that is split: each rank divides by what the ranks count on average, not by what it counts itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acc_plugins.parallel.exchange import Line

_SIGNATURES = {
    F.cross_entropy: inspect.signature(F.cross_entropy),
    F.nll_loss: inspect.signature(F.nll_loss),
}


def is_counted(function: Callable[..., Any]) -> bool:
    """Whether the function divides a sum by the number of targets that count."""
    return function in _SIGNATURES


@torch.compiler.disable
def mean_loss(
    function: Callable[..., Any], line: Line, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """`cross_entropy` or `nll_loss` such that the mean over the ranks is the mean over all their targets.

    With `reduction="mean"` torch divides by the targets that are not ignored (by their classes' weights). Ranks with different numbers of them
    would count the same otherwise. Other reductions, and targets that are probabilities, are torch's own.
    """
    bound = _SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    legacy = given["size_average"] is not None or given["reduce"] is not None
    target = given["target"]
    result: Tensor
    if legacy or given["reduction"] != "mean" or target.is_floating_point():
        result = function(*args, **kwargs)
        return result
    given["reduction"] = "sum"
    counts = target != given["ignore_index"]
    weight = given["weight"]
    if weight is None:
        number = counts.sum().to(given["input"].dtype)
    else:
        number = weight[target[counts]].sum()
    result = function(*bound.args, **bound.kwargs) / line.mean(number)
    return result
