"""The names of dtypes: torch's own, and those of the safetensors format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# https://github.com/huggingface/safetensors, "Format": the dtype field of a header entry
_SAFETENSORS_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}
_BY_SAFETENSORS_NAME: dict[str, torch.dtype] = {
    short: getattr(torch, name) for short, name in _SAFETENSORS_NAMES.items() if hasattr(torch, name)
}
_TWO_IN_A_BYTE = (
    "F4"  # torch's shapes count the bytes, those of the format the numbers, along the last dimension
)
_LARGEST_SIZE = 2**63 - 1
_SAFETENSORS_NAME_OF = {dtype: short for short, dtype in _BY_SAFETENSORS_NAME.items()}


def dtype_named(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of `dtype`: itself, or the one called "bfloat16" or "torch.bfloat16".

    Raises ValueError for a name that torch does not know.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a torch dtype; write it like 'bfloat16' or torch.bfloat16")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    """What `dtype` is called in an offload index: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def layout_of_safetensors(shape: Sequence[int], name: str) -> tuple[torch.Size, torch.dtype]:
    """The torch shape and dtype of a safetensors header entry; ValueError for one that this torch cannot hold."""
    try:
        dtype = _BY_SAFETENSORS_NAME[name]
    except KeyError:
        raise ValueError(
            f"the safetensors dtype {name!r} has no counterpart in torch {torch.__version__}"
        ) from None
    if any(size > _LARGEST_SIZE for size in shape):
        raise ValueError(f"torch cannot hold the shape {tuple(shape)}")
    if name != _TWO_IN_A_BYTE:
        return torch.Size(shape), dtype
    if not shape or shape[-1] % 2:
        raise ValueError(f"the shape {tuple(shape)} of {name!r} does not fill whole bytes")
    return torch.Size([*shape[:-1], shape[-1] // 2]), dtype


def safetensors_shape(shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    """The shape that a safetensors header gives a torch tensor; ValueError for one that the format cannot hold."""
    if _SAFETENSORS_NAME_OF.get(dtype) != _TWO_IN_A_BYTE:
        return list(shape)
    if not shape:
        raise ValueError(f"safetensors cannot hold {dtype} without dimensions; give it one")
    return [*shape[:-1], shape[-1] * 2]


def safetensors_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; ValueError for one that the format cannot hold."""
    try:
        return _SAFETENSORS_NAME_OF[dtype]
    except KeyError:
        raise ValueError(
            f"safetensors cannot hold {dtype}; convert the tensor, or save with safe=False (torch.save)"
        ) from None
