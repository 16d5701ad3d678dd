"""Tensors to an offload folder and back, in the file format described in `stores/disk.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from acc_bigmodel.stores.disk import (
    INDEX_FILE,
    OffloadedWeightsLoader,
    raw_file,
    read_offload_index,
    read_raw,
    write_raw,
)
from acc_bigmodel.stores.dtypes import name_of_dtype
from acc_hooks.tensors import set_module_tensor_to_device


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write one tensor to `offload_folder/NAME.dat`; adds its dtype and shape to `index` when given, and returns that.

    The folder must exist. Raises RuntimeError for a tensor on the meta device.
    """
    if weight.device.type == "meta":
        raise RuntimeError(f"{weight_name!r} is on the meta device and has no values to offload")
    write_raw(weight, raw_file(offload_folder, weight_name))
    if index is not None:
        index[weight_name] = {"dtype": name_of_dtype(weight.dtype), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """The tensor in a `.dat` file, mapped; `weight_info` is its index entry ("dtype", "shape").

    Raises FileNotFoundError, or ValueError when the file does not have the size that the entry asks for.
    """
    return read_raw(weight_file, weight_info)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Merge `index` into `offload_folder/index.json`, which appears whole; nothing is written for an empty one."""
    if not index:
        return
    file = Path(offload_folder) / INDEX_FILE
    known = read_offload_index(offload_folder) if file.exists() else {}
    staged = file.with_name(f".{INDEX_FILE}.writing")
    staged.write_text(json.dumps({**known, **index}, indent=2) + "\n", encoding="utf-8")
    os.replace(staged, file)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of `state_dict` to the folder, which is made when missing, and then its index."""
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def offload_or_reuse(save_dir: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Offload `state` into a folder that may hold something already; returns the index of exactly these tensors.

    A file is used as it is only when its bytes are those of the tensor. A tensor on the meta device has no bytes to
    compare: the folder must hold one of the same dtype and shape, or this raises RuntimeError.
    """
    os.makedirs(save_dir, exist_ok=True)
    known = read_offload_index(save_dir) if (Path(save_dir) / INDEX_FILE).exists() else {}
    index: dict[str, Any] = {}
    for name, tensor in state.items():
        info = known.get(name)
        if tensor.device.type == "meta":
            _check_entry(name, tensor, info, save_dir)
            index[name] = info
        elif info is not None and _holds(save_dir, name, info, tensor):
            index[name] = info
        else:
            offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)
    return index


def load_offloaded_weights(
    model: torch.nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put every weight that `index` names back into `model`, on the CPU; an empty index does nothing.

    Raises ValueError or AttributeError for a name that the model does not have.
    """
    if not index:
        return
    for name, tensor in OffloadedWeightsLoader(save_folder=offload_folder, index=index).items():
        set_module_tensor_to_device(model, name, "cpu", value=tensor)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The entries that are named in `submodule_names`, or below one of them; "" names everything."""
    wanted = set(submodule_names)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if any(part in wanted for part in _and_parents(name))
    }


def _and_parents(name: str) -> Iterable[str]:
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _check_entry(
    name: str, tensor: torch.Tensor, info: Mapping[str, Any] | None, folder: str | os.PathLike[str]
) -> None:
    if info is None:
        raise RuntimeError(
            f"{name!r} is on the meta device and {os.fspath(folder)} does not hold it either; load the weights first"
        )
    if "shape" in info and tuple(info["shape"]) != tuple(tensor.shape):
        raise RuntimeError(
            f"{os.fspath(folder)} holds {name!r} with the shape {tuple(info['shape'])}, the model has "
            f"{tuple(tensor.shape)}: the folder belongs to another model"
        )


def _holds(folder: str | os.PathLike[str], name: str, info: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    if info.get("dtype") != name_of_dtype(tensor.dtype) or info.get("shape") != list(tensor.shape):
        return False
    try:
        stored = read_raw(raw_file(folder, name), info)
    except (OSError, ValueError):
        return False
    return torch.equal(_bytes_of(stored), _bytes_of(tensor.detach().to("cpu")))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
