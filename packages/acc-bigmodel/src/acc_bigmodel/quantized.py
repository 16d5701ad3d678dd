"""Weights in 8 bits, in the form of bitsandbytes, to an offload folder."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from acc_bigmodel.offload import offload_weight
from acc_hooks.tensors import owner_of, set_module_tensor_to_device
from acc_ops.devices import present_kind
from acc_ops.optional import require

_STATISTICS = "SCB"  # in the place of "weight"; acc-hooks hangs them on the weight that it brings (homes.py)


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
    owner, name = owner_of(model, param_name)
    before = owner._parameters.get(name)
    statistics = fp16_statistics
    if fp16_statistics is None:
        if type(before).__name__ == "Int8Params":
            require("bitsandbytes", "quantising a weight to 8 bits", min_version="0.37.2")
        kind = present_kind()
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
        try:
            set_module_tensor_to_device(model, param_name, device, value=param, dtype=new_dtype)
            quantised = owner._parameters[name]
            assert quantised is not None
            param, statistics = quantised.detach(), getattr(quantised, "SCB", None)
        finally:
            owner._parameters[name] = before
    written = {param_name: param}
    if statistics is not None:
        written[_statistics_of(param_name)] = statistics
    for key, tensor in written.items():
        offload_weight(tensor, key, offload_folder, offload_index)
    empty = torch.empty_like(param, device="meta")
    set_module_tensor_to_device(model, param_name, "meta", value=empty, dtype=param.dtype)


def weight_of(name: str) -> str:
    """The name of the weight whose statistics are kept under `name`; any other name as it is."""
    path, dot, local = name.rpartition(".")
    return f"{path}{dot}weight" if local == _STATISTICS else name


def _statistics_of(name: str) -> str:
    path, dot, local = name.rpartition(".")
    if local != "weight":
        raise ValueError(
            f"the statistics of {name!r} have no name: only parameters called 'weight' are quantised to 8 bits"
        )
    return f"{path}{dot}{_STATISTICS}"
