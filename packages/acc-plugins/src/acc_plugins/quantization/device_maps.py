"""Where the parts of a model with few-bit weights go: a device map, made with the sizes that the weights will have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from acc_bigmodel import get_balanced_memory, infer_auto_device_map
from acc_bigmodel.budget import DeviceKey, MaxMemory, check_present, device_key
from acc_bigmodel.device_map import expand_device_map
from acc_bigmodel.measure import DtypeLike
from acc_bigmodel.placement import CPU, DISK
from acc_hooks.tensors import is_plain
from acc_hooks.ties import every_tensor
from acc_ops.world import current_world
from acc_plugins.quantization.choose import weight_format
from acc_plugins.quantization.format import WeightFormat
from acc_plugins.quantization.layers import is_named

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: Any,
    device_map: str | Mapping[str, DeviceKey] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
) -> dict[str, DeviceKey]:
    """The device map for `model` with the weights of its linear layers in few bits; the layers may have been exchanged already.

    None is this process's device for everything: the current accelerator, or the CPU where there is none. A name ("auto", "balanced",
    "balanced_low_0", "sequential") infers a map within `max_memory`, as `infer_auto_device_map` does. A mapping stays as it is.

    Raises ValueError for another name, for a device that is not there, and for a 4-bit weight that would be offloaded: to the disk, or to the
    CPU while an accelerator computes.
    """
    kind = weight_format(bnb_quantization_config)
    return quantized_device_map(
        model, kind, kind.left_out(model), device_map, max_memory, no_split_module_classes
    )


def quantized_device_map(
    model: nn.Module,
    kind: WeightFormat,
    left_out: Sequence[str],
    device_map: str | Mapping[str, DeviceKey] | None,
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Sequence[str] | None,
) -> dict[str, DeviceKey]:
    """`get_quantized_model_device_map` for a format that was chosen already."""
    names = kind.names(model, left_out)
    if device_map is None:
        return {"": current_world().device}
    if isinstance(device_map, str):
        device_map = _inferred(model, kind, names, device_map, max_memory, no_split_module_classes)
    check_present(device_map)
    if not kind.can_offload:
        _refuse_offload(device_map, names)
    return dict(device_map)


def rest_dtype(kind: WeightFormat, name: str) -> torch.dtype | None:
    """The dtype that a tensor takes that is not quantised; None: the one it has."""
    return torch.float32 if is_named(name, kind.keep_in_fp32) else kind.rest_dtype


def is_rest(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not quantised takes another dtype at all: a plain one of real numbers."""
    return is_plain(tensor) and tensor.is_floating_point()


def _inferred(
    model: nn.Module,
    kind: WeightFormat,
    names: Sequence[str],
    how: str,
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Sequence[str] | None,
) -> dict[str, DeviceKey]:
    if how not in _AUTOMATIC:
        raise ValueError(f"device_map must be a mapping or one of {', '.join(_AUTOMATIC)}; got {how!r}")
    few = set(names)
    dtypes: dict[str, DtypeLike] = dict.fromkeys(names, kind.target_dtype)
    for name, tensor in every_tensor(model):
        wanted = rest_dtype(kind, name)
        if name not in few and wanted is not None and is_rest(tensor):
            dtypes[name] = wanted
    if how != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split_module_classes=no_split_module_classes,
            special_dtypes=dtypes,
            low_zero=how == "balanced_low_0",
        )
    return dict(
        infer_auto_device_map(
            model, max_memory, no_split_module_classes=no_split_module_classes, special_dtypes=dtypes
        )
    )


def _refuse_offload(device_map: Mapping[str, DeviceKey], names: Sequence[str]) -> None:
    homes = expand_device_map(device_map, names, default=CPU)
    computes = next(
        (device for device in map(device_key, device_map.values()) if device not in (CPU, DISK)), CPU
    )
    away = [name for name, home in homes.items() if home == DISK or (home == CPU and computes != CPU)]
    if away:
        raise ValueError(
            f"the device map offloads {len(away)} weights that shall have few bits, the first is {away[0]!r}, and only 8-bit weights of "
            "bitsandbytes can be offloaded: give more memory or a device map of your own, name the modules in skip_modules, or use "
            "load_in_8bit=True"
        )
