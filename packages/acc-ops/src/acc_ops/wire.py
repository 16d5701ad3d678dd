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
    check_arithmetic(dtype)
    if dtype not in _KNOWN and dtype not in _WIDER and not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"tensors of {dtype} cannot be reduced; convert them to int64 or float first")
    if dtype.is_complex and op in ("max", "min"):
        raise ValueError(f"complex numbers have no order, so op={op!r} does not work for {dtype}")


def check_arithmetic(dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype that torch can store, and neither convert nor calculate with."""
    if dtype in _STORED_ONLY:
        raise TypeError(
            f"tensors of {dtype} are only stored and cannot be reduced; unpack them to int64 or float first"
        )


def has_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of this class are memory; those of DTensor, FakeTensor and other wrappers only answer for what is elsewhere."""
    return bool(kind.__torch_dispatch__ is Tensor.__torch_dispatch__)


def check_memory(name: str, kind: type[Tensor]) -> None:
    """Raise TypeError for tensors of a class that `has_memory` denies."""
    if not has_memory(kind):
        raise TypeError(
            f"{name} takes dense tensors with data, got a {kind.__name__}, which has no memory of its own "
            "(__torch_dispatch__): pass what it stands for, such as full_tensor() or to_local() of a DTensor"
        )


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
        tensor = copyable(tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.ndim != 1:
        tensor = tensor.reshape(-1)
    if (
        tensor.stride(0) != 1
    ):  # of at most one element, which is contiguous whatever its stride; but not to view()
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def copyable(tensor: Tensor) -> Tensor:
    """A view with which torch can do what only moves elements: of the bytes, where it has no such operations for the dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in UNCOPIED else tensor


def to_bytes(tensor: Tensor) -> bytes:
    """The memory of a contiguous CPU tensor of uint8. Raises TypeError for a tensor that only stands for one."""
    check_memory("a collective", type(tensor))  # where a FakeTensorMode is on, every new tensor is such a one
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
        copyable(tensor.detach()).copy_(copyable(value.view(tensor.shape)))
    return tensor


def shares_elements(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one number in memory, as after `expand` or `unfold`."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0  # of the dimensions with smaller steps
    for step, size in dims:
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    # Steps like 2 and 3 may interleave without meeting: only the places themselves tell.
    places = torch.zeros(1, dtype=torch.int64)
    for step, size in dims:
        places = (places.unsqueeze(1) + torch.arange(size) * step).flatten()
    return bool(places.unique().numel() < places.numel())


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.device == other.device


def _dtypes(*names: str) -> frozenset[torch.dtype]:
    """Those that this torch has."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


# One byte each, which torch stores and reinterprets, but can neither copy, join nor convert.
UNCOPIED = _dtypes("float4_e2m1fn_x2", *[f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)])
_STORED_ONLY = UNCOPIED | _dtypes("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
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
