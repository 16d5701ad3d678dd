"""What padding to a common size takes: whether it can be done, what the ranks compare of it, and one tensor padded."""

from __future__ import annotations

import cmath
import functools
from typing import Any

import torch
from torch import Tensor

from acc_ops.arguments import whole_number
from acc_ops.prepared import Arguments
from acc_ops.tree import flatten, unflatten

_STAND_IN = torch.zeros(())  # without dimensions, so nothing pads it


def ready_to_pad(data: Any, pad_index: float) -> Any:
    """`data`, or the like of it with stand-ins where it has nested tensors; ValueError when a dtype cannot hold `pad_index`."""
    leaves, structure = flatten(data)
    holds = _known_to_hold if type(pad_index) in (int, float) else _holds
    for dtype in {leaf.dtype for leaf in leaves if not leaf.is_nested}:
        if not holds(dtype, pad_index):
            raise ValueError(f"pad_index={pad_index!r} does not fit into {dtype}")
    if not any(leaf.is_nested for leaf in leaves):
        return data
    return unflatten(structure, [_STAND_IN if leaf.is_nested else leaf for leaf in leaves])


def padding_texts(dim: int, pad_index: Any, pad_first: bool) -> Arguments:
    """What the ranks have to agree about, in words: the same for a pad_index of 0, 0.0 and tensor(0)."""
    number = pad_index.item() if hasattr(pad_index, "item") else pad_index
    if isinstance(number, (bool, float)) and number == number // 1:
        number = int(number)
    return (
        ("dim", repr(whole_number(dim, "dim"))),
        ("pad_index", repr(number)),
        ("pad_first", repr(bool(pad_first))),
    )


def padded(leaf: Tensor, target: int, dim: int, pad_index: float, pad_first: bool) -> Tensor:
    if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] == target:
        return leaf
    shape = list(leaf.shape)
    size, shape[dim] = shape[dim], target
    filled = leaf.new_full(shape, pad_index)
    filled.narrow(dim, target - size if pad_first else 0, size).copy_(leaf)
    return filled


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a tensor of `dtype` can be filled with `number`: rounded to it, but neither wrapped around nor to infinity."""
    try:
        held = torch.zeros(1, dtype=dtype).new_full((1,), number).item()
    except (RuntimeError, TypeError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return cmath.isfinite(held) or not cmath.isfinite(number)
    return dtype == torch.bool or held == number


_known_to_hold = functools.lru_cache(maxsize=64)(_holds)
