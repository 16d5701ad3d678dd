"""What travels between ranks and how numbers are combined: the arithmetic every Comm shares.

[Note: what travels] gather, broadcast and scatter only carry bytes, so every dtype travels as `uint8`: gloo knows neither int16 nor float8
nor bool. Reductions do arithmetic, so a dtype the backend may not know is computed in a wider one that holds every result exactly
enough, and comes back as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = ("sum", "max", "min", "product")


def check_root(root: int, size: int, name: str = "root") -> None:
    """Raise ValueError unless `root` is a rank of a world of `size`."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise ValueError(f"{name} must be a rank from 0 to {size - 1}, got {root!r}")


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `op` is a reduction, TypeError or ValueError unless numbers of `dtype` have it."""
    if op not in REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
    if dtype not in _KNOWN and dtype not in _WIDER and not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"tensors of {dtype} cannot be reduced; convert them to int64 or float first")
    if dtype.is_complex and op in ("max", "min"):
        raise ValueError(f"complex numbers have no order, so op={op!r} does not work for {dtype}")


def check_parts(parts: Sequence[Any] | None, size: int, root: int) -> Sequence[Any]:
    """Rank `root`'s parts; ValueError unless there is one for each rank."""
    if parts is None or len(parts) != size:
        got = "None" if parts is None else f"{len(parts)}"
        raise ValueError(f"rank {root} has to give one part for each of the {size} ranks, got {got}")
    return parts


def as_bytes(tensor: Tensor) -> Tensor:
    """The contents of a tensor of any dtype as flat `uint8`; shares memory where the tensor is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """The memory of a contiguous CPU tensor of uint8."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def from_bytes(data: bytes) -> Tensor:
    """A flat uint8 tensor that holds `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def combine(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Tensors of one dtype combined in order by `op`, with the arithmetic of `Comm.all_reduce`."""
    dtype = tensors[0].dtype
    wide = [arithmetic(tensor, op) for tensor in tensors]
    total = wide[0].clone()
    function = _COMBINE[_bool_op(op) if dtype == torch.bool else op]
    for other in wide[1:]:
        total = function(total, other)
    return torch.view_as_complex(total) if dtype.is_complex and op != "product" else total.to(dtype)


def as_typed(wire: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return wire.view(dtype).view(shape)


def overwrite(tensor: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        tensor.detach().copy_(value.view(tensor.shape))
    return tensor


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.device == other.device


_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_KNOWN = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)


def arithmetic(tensor: Tensor, op: str) -> Tensor:
    """`tensor` in a dtype every backend can reduce; the very same memory where its own dtype is one."""
    tensor = tensor.detach()
    if tensor.is_complex() and op != "product":
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    if tensor.dtype in _KNOWN or tensor.is_complex():
        return tensor
    if tensor.is_floating_point():
        if tensor.dtype == torch.bfloat16 and tensor.device.type != "cpu":
            return tensor
        return tensor.to(torch.float32)  # bfloat16 on gloo and the float8 kinds: rounded once, at the end
    return tensor.to(_WIDER[tensor.dtype])


def _bool_op(op: str) -> str:
    return "max" if op in ("sum", "max") else "min"


def torch_op(op: str, dtype: torch.dtype) -> Any:
    return getattr(dist.ReduceOp, (_bool_op(op) if dtype == torch.bool else op).upper())


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
