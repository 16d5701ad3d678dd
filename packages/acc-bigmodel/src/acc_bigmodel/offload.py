"""Tensors to an offload folder and back, in the file format described in `stores/folder.py`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from acc_bigmodel.atoms import and_parents
from acc_bigmodel.stores.disk import OffloadedWeightsLoader
from acc_bigmodel.stores.dtypes import name_of_dtype
from acc_bigmodel.stores.folder import (
    home_of,
    known_entries,
    merge_index,
    raw_file,
    read_raw,
    same_bytes,
    statistics_of,
    stored_raw_file,
    write_raw,
)
from acc_bigmodel.stores.locking import locked, sweep
from acc_hooks.tensors import set_module_tensor_to_device
from acc_hooks.ties import group_by_tensor

OFFLOAD_LOCK_FILE = ".offload.lock"

_mine = threading.local()  # the folders that this thread has alone


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
        index[weight_name] = _entry(weight)
    return index


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """The tensor in a `.dat` file, mapped; `weight_info` is its index entry ("dtype", "shape").

    Raises FileNotFoundError, or ValueError when the file does not have the size that the entry asks for.
    """
    return read_raw(weight_file, weight_info)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Merge `index` into `offload_folder/index.json`, which appears whole; nothing is written for an empty one.

    Several processes and threads may do so at once: no entry is lost.
    """
    if index:
        merge_index(offload_folder, index)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of `state_dict` to the folder, which is made when missing, and then its index.

    Whoever is killed in between leaves an index without the tensors that were to be replaced, never with others.
    """
    with offloading_into(save_dir):
        forget_entries(save_dir, state_dict)
        index: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            offload_weight(tensor, name, save_dir, index)
        save_offload_index(index, save_dir)


@contextlib.contextmanager
def offloading_into(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Alone in an offload folder, which is made when missing, among the threads and processes that ask.

    Who offloads, and then maps what it offloaded, before this ends has its own weights, whatever others do. What killed
    writers left half written is deleted. Who has the folder already may ask again.
    """
    os.makedirs(folder, exist_ok=True)
    mine: set[str] = _mine.__dict__.setdefault("folders", set())
    path = os.path.realpath(folder)
    if path in mine:
        yield
        return
    with locked(folder, OFFLOAD_LOCK_FILE):
        mine.add(path)
        try:
            sweep(folder)
            yield
        finally:
            mine.discard(path)


def offload_or_reuse(save_dir: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Offload `state` into a folder that may hold something already; returns the index of exactly these tensors.

    Inside of `offloading_into`, as far as the caller wants to map the very same. Names that share a tensor share a file. A
    file is used as it is only when its bytes are those of the tensor. A tensor on the meta device has no bytes to compare:
    the folder must hold one of the same shape, or this raises RuntimeError.
    """
    os.makedirs(save_dir, exist_ok=True)
    known = known_entries(save_dir)
    leader_of = {name: group[0] for group in group_by_tensor(state.items()) for name in group}
    index: dict[str, Any] = {}
    to_write: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        leader = leader_of.get(name, name)
        info = known.get(name)
        if tensor.device.type == "meta":
            _check_entry(name, tensor, info, save_dir)
            same = leader != name and _same_content(save_dir, known, leader, name)
            index[name] = {**known[name], "same_as": home_of(leader, known[leader])} if same else info
            index.update(_statistics(name, known))
        elif leader != name:
            index[name] = {**_entry(tensor), "same_as": leader}
        elif info is not None and "same_as" not in info and _holds(save_dir, name, info, tensor):
            index[name] = info
        else:
            index[name] = _entry(tensor)
            to_write[name] = tensor
    forget_entries(save_dir, to_write)
    for name, tensor in to_write.items():
        offload_weight(tensor, name, save_dir)
    merge_index(save_dir, index)
    return index


def forget_entries(folder: str | os.PathLike[str], names: Collection[str]) -> None:
    """Strike these tensors, and what shares a file with them, from the index of a folder in which they are to be replaced."""
    merge_index(folder, {}, lambda name, info: home_of(name, info) in names)


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
        if any(part in wanted for part in and_parents(name))
    }


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


def _statistics(name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the statistics of an 8-bit weight, if the folder has them."""
    if known[name].get("dtype") != "int8" or name.rpartition(".")[2] != "weight":
        return {}
    statistics = statistics_of(name)
    return {statistics: known[statistics]} if statistics in known else {}


def _holds(folder: str | os.PathLike[str], name: str, info: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    if info.get("dtype") != name_of_dtype(tensor.dtype) or info.get("shape") != list(tensor.shape):
        return False
    stored = _stored(folder, name, info)
    return stored is not None and same_bytes(stored, tensor.to("cpu"))


def _same_content(folder: str | os.PathLike[str], known: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether the folder has raw files of the same content for both names, or one file."""
    one, two = (None if key not in known else _stored(folder, key, known[key]) for key in (name, other))
    return one is not None and two is not None and same_bytes(one, two)


def _stored(folder: str | os.PathLike[str], name: str, info: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor in a raw file; None for a slice, and for a file that is damaged or not there."""
    try:
        return read_raw(stored_raw_file(folder, home_of(name, info)), info)
    except (OSError, KeyError, ValueError):
        return None


def _entry(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": name_of_dtype(tensor.dtype), "shape": list(tensor.shape)}
