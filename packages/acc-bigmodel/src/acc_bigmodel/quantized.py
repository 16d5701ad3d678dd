"""Weights in 8 bits, in the form of bitsandbytes, to an offload folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from acc_bigmodel.offload import forget_entries, offload_weight, save_offload_index
from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.folder import statistics_of
from acc_hooks.placeholder import kind_of
from acc_hooks.tensors import owner_of, place, set_module_tensor_to_device
from acc_ops.devices import present_kind
from acc_ops.optional import require


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: str | torch.dtype | None,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any] | None,
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Quantise one weight, write it with its statistics to the offload folder, and leave it on meta in `model`.

    `param` (out, in), in `new_dtype`, is quantised by the parameter it is put into (bitsandbytes' Int8Params): on the
    first accelerator, on a machine without one by bitsandbytes' kernels for the CPU. With `fp16_statistics` it is int8
    already. `NAME.dat` has the int8 values, `NAME with SCB for weight` the largest magnitude of each row (out,), both are
    added to `offload_index`: what the hooks of a dispatched model read. A parameter of another class is written as it is.

    Raises ImportError without bitsandbytes, and what `set_module_tensor_to_device` raises; the model is then as it was.
    """
    owner, local = owner_of(model, param_name)
    old = owner._parameters.get(local, owner._buffers.get(local))
    if old is None:
        raise ValueError(f"{param_name!r} is no parameter or buffer of this {type(model).__name__}")
    written = quantised(old, param, param_name, new_dtype, fp16_statistics)
    for key, tensor in written.items():
        offload_weight(tensor, key, offload_folder, offload_index)
    empty = torch.empty_like(written[param_name], device="meta")
    set_module_tensor_to_device(model, param_name, "meta", value=empty, dtype=empty.dtype)


def is_8bit(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter of bitsandbytes that quantises to 8 bits."""
    return kind_of(tensor).__name__ == "Int8Params"


def quantised(
    old: torch.Tensor,
    value: torch.Tensor,
    name: str,
    dtype: str | torch.dtype | None,
    statistics: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What is kept of `value` in the place of `old`, by name: if `old` quantises, int8 values and their statistics.

    Nothing is done to a value that has its `statistics` already.
    """
    if statistics is None:
        if is_8bit(old):
            statistics_of(name)  # raises if it cannot have any
            require("bitsandbytes", "quantising a weight to 8 bits", min_version="0.37.2")
        kind = present_kind()
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
        made = place(old, value, device, name=name, dtype=None if dtype is None else dtype_named(dtype))
        value, statistics = made.detach(), getattr(made, "SCB", None)
        if is_8bit(old) and (value.dtype != torch.int8 or statistics is None):
            raise ValueError(
                f"{name!r} was not quantised on {device}, it is {value.dtype} there: use a bitsandbytes that has kernels for it"
            )
    return {name: value} if statistics is None else {name: value, statistics_of(name): statistics}


def offload_8bit(
    folder: str | os.PathLike[str],
    names: Collection[str],
    weights: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    dtype: str | torch.dtype | None,
) -> dict[str, dict[str, Any]]:
    """Quantise the `weights` one by one, and write them; returns their index, statistics included.

    They are (name, parameter of the model, value), and `names` all their names. The caller has the folder alone
    (`offloading_into`). What is replaced is struck from the folder's index first.
    """
    forget_entries(folder, {*names, *map(statistics_of, names)})
    index: dict[str, dict[str, Any]] = {}
    for name, old, value in weights:
        for key, tensor in quantised(old, value, name, dtype).items():
            offload_weight(tensor, key, folder, index)
    save_offload_index(index, folder)
    return index
