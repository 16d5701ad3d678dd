"""Offloaded weights: one raw file per tensor, or slices of safetensors files, found through an index.

[Note: the offload folder]
`NAME.dat` holds the bytes of one tensor in row order and nothing else; `index.json` says what they are:
`{"NAME": {"dtype": "bfloat16", "shape": [4, 8]}}`. An entry may instead point into a safetensors file:
`{"safetensors_file": PATH, "weight_name": NAME, "dtype": "bfloat16"}` (the last two are optional).
Files are replaced, never rewritten, so that a model which mapped them before keeps its own weights.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.safetensors import SafetensorsStore, write_bytes
from acc_bigmodel.stores.store import FileSlice, WeightStore

INDEX_FILE = "index.json"
# below the usual limit of 65,530 maps a process
_HELD_FILES = 16_384


class OffloadedWeightsLoader(WeightStore):
    """The weights of an offloaded model: `state_dict` in memory first, then what `index` says about the disk.

    `index` defaults to `save_folder/index.json`. What is read is mapped, and mapped once: a change made in place to a
    weight that was handed out on the CPU is there again the next time, and never reaches the file. `device` is where
    weights from the disk are put (default: they stay mapped on the CPU).

    Raises ValueError when neither `state_dict`, `save_folder` nor `index` is given.
    """

    def __init__(
        self,
        state_dict: dict[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("nothing to load weights from: give a state_dict, a save_folder or an index")
        self.state_dict: dict[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index: dict[str, Mapping[str, Any]] = dict(index)
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self.device = device
        self._mapped: dict[str, torch.Tensor] = {}
        self._files: dict[str, SafetensorsStore] = {}
        self._identities: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        tensor = self._from_disk(key)
        return tensor if self.device is None else tensor.to(self.device)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        """Keep another value, in memory: the files never change."""
        if key not in self:
            self.all_keys.append(key)
        self.state_dict[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_mapped": {},
            "_files": {},
            "_identities": {},
        }  # maps stay behind, paths travel

    def shape(self, name: str) -> torch.Size:
        if name in self.state_dict:
            return self.state_dict[name].shape
        info = self.index[name]
        return (
            self._slices(info).shape(info.get("weight_name", name))
            if _is_slice(info)
            else torch.Size(info["shape"])
        )

    def dtype(self, name: str) -> torch.dtype:
        if name in self.state_dict:
            return self.state_dict[name].dtype
        info = self.index[name]
        if info.get("dtype") is not None:
            return dtype_named(info["dtype"])
        return self._slices(info).dtype(info.get("weight_name", name))

    def source(self, name: str) -> FileSlice | None:
        info = self.index.get(name, {})
        if name in self.state_dict or not _is_slice(info):
            return None
        found = self._slices(info).source(info.get("weight_name", name))
        return found if found is not None and found.dtype == self.dtype(name) else None

    def hold(self) -> None:
        """Map every raw file now, so that replacing the files later cannot change this model's weights."""
        for name, info in self.index.items():
            if name in self.state_dict or _is_slice(info):
                continue
            if len(self._mapped) < _HELD_FILES:
                self._from_disk(name)
            else:
                self._identities[name] = _identity(raw_file(self._folder(name), name))

    def _from_disk(self, name: str) -> torch.Tensor:
        if name in self._mapped:
            return self._mapped[name]
        info = self.index[name]
        if _is_slice(info):
            stored = self._slices(info)[info.get("weight_name", name)]
            tensor = stored if info.get("dtype") is None else stored.to(dtype_named(info["dtype"]))
            if tensor is not stored:
                return tensor  # converted: holding it would keep it in memory
            self._mapped[name] = tensor
        else:
            file = raw_file(self._folder(name), name)
            known = self._identities.get(name)
            if known is not None and known != _identity(file):
                raise RuntimeError(
                    f"{file} was replaced after this model was offloaded; offload each model into a folder of its own"
                )
            self._mapped[name] = read_raw(file, info)
        return self._mapped[name]

    def _folder(self, name: str) -> str | os.PathLike[str]:
        if self.save_folder is None:
            raise ValueError(
                f"the offload index says that {name!r} is in a folder, but no save_folder was given"
            )
        return self.save_folder

    def _slices(self, info: Mapping[str, Any]) -> SafetensorsStore:
        file = os.fspath(info["safetensors_file"])
        if file not in self._files:
            beside = None if self.save_folder is None else os.path.join(self.save_folder, file)
            self._files[file] = SafetensorsStore(beside if beside and not os.path.exists(file) else file)
        return self._files[file]


def raw_file(folder: str | os.PathLike[str], name: str) -> str:
    """The file of one raw tensor; a slash in the name does not make a folder."""
    return os.path.join(folder, name.replace("/", "%2F").replace(os.sep, "%5C") + ".dat")


def read_raw(file: str | os.PathLike[str], info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a raw file, mapped; `info` has its "dtype" (a name) and "shape".

    Raises FileNotFoundError, or ValueError when the file has another size than `info` says.
    """
    dtype, shape = dtype_named(info["dtype"]), torch.Size(info["shape"])
    nbytes = math.prod(shape) * dtype.itemsize
    found = os.path.getsize(file)
    if found < nbytes or (nbytes and found > nbytes):
        raise ValueError(
            f"{os.fspath(file)} has {found} bytes, but {info['dtype']} of shape {tuple(shape)} has {nbytes}; the file is "
            "damaged or belongs to another model: offload again"
        )
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage: Any = torch.UntypedStorage.from_file(os.fspath(file), False, nbytes)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


def write_raw(tensor: torch.Tensor, file: str) -> None:
    """Write the bytes of one tensor; the file appears whole, and who mapped an earlier one keeps it."""
    staged = f"{file}.writing"
    try:
        with open(staged, "wb") as out:
            write_bytes(out, tensor)
        os.replace(staged, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The index of an offload folder; FileNotFoundError or ValueError when there is no usable one."""
    file = Path(folder) / INDEX_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not an offload folder: it has no {INDEX_FILE}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(info, dict) for info in content.values()):
        raise ValueError(f"{file} is not an offload index: it must map tensor names to what they are")
    return content


def _is_slice(info: Mapping[str, Any]) -> bool:
    return info.get("safetensors_file") is not None


def _identity(file: str) -> tuple[int, ...]:
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
