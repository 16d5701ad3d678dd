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

from acc_ops.devices import device_row

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
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype != torch.uint8:
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    if tensor.ndim != 1:
        tensor = tensor.reshape(-1)
    if (
        tensor.stride(0) != 1
    ):  # of at most one element, which is contiguous whatever its stride; but not to view()
        tensor = tensor.clone(memory_format=torch.contiguous_format)
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


def share_of_mean(tensor: Tensor, size: int) -> Tensor:
    """What one of `size` ranks adds to a mean: wide enough that the sum neither overflows nor rounds before the end.

    Halves and float8 are added as float32, integers and bools as float64 (float32 where the device has none), each times a power of
    two of at most 1 / `size`, which costs no digit of any number above 3e-38 * `size`.
    """
    wide = tensor.detach().to(_mean_dtype(tensor))
    return wide if size == 1 else wide * 2.0 ** -_halvings(size)


def mean_of_shares(total: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The mean of tensors of `dtype`, given the sum of their shares: of that dtype, for integers and bools of the default one."""
    mean = total if size == 1 else total / (size * 2.0 ** -_halvings(size))
    if dtype.is_floating_point or dtype.is_complex:
        return mean.to(dtype)
    return mean.to(torch.get_default_dtype())


def scaled(tensor: Tensor, scale: float) -> Tensor:
    """`tensor` times `scale`, in its own dtype."""
    wide = (
        tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    )  # float8 does not multiply
    return (wide * scale).to(tensor.dtype)


def as_typed(wire: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return in_shape(wire if dtype == torch.uint8 else wire.view(dtype), shape)


def in_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor.view(shape)`, but sizes that are given one by one are read in half the time."""
    return tensor.view(*shape) if shape else tensor.view(())


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


def to_ordered(wire: Tensor, op: str) -> Tensor:
    """Floats as integers of the same order, with NaN as the one that wins `op`, max or min.

    A backend's own max keeps a NaN or drops it as the ranks happen to come. The bits of a float are ordered like integers when those of
    negative ones are turned around (IEEE 754, totalOrder).
    """
    wire = wire.float() if wire.itemsize < 4 else wire
    bits = wire.view(torch.int64 if wire.itemsize == 8 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    return _turned(bits).masked_fill_(wire.isnan(), limits.max if op == "max" else limits.min)


def from_ordered(keys: Tensor) -> Tensor:
    """The floats that `to_ordered` made integers of."""
    return _turned(keys).view(torch.float64 if keys.itemsize == 8 else torch.float32)


def _turned(bits: Tensor) -> Tensor:
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _halvings(size: int) -> int:
    return (size - 1).bit_length()


def _mean_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex64 if tensor.dtype == torch.complex32 else tensor.dtype
    if tensor.is_floating_point():
        return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return torch.float64 if device_row(tensor.device).float64 else torch.float32


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
