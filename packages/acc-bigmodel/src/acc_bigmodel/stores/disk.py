"""Offloaded weights: raw files of an offload folder (`stores/folder.py`) or slices of safetensors files, through an index."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.folder import (
    home_of,
    layout_of_entry,
    read_offload_index,
    read_raw,
    same_bytes,
    stored_raw_file,
)
from acc_bigmodel.stores.safetensors import SafetensorsStore
from acc_bigmodel.stores.store import FileSlice, ReplacedFileError, WeightStore, file_identity

# below the usual limit of 65,530 maps a process
_HELD_FILES = 16_384


class OffloadedWeightsLoader(WeightStore):
    """The weights of an offloaded model: `state_dict` in memory first, then what `index` says about the disk.

    `index` defaults to `save_folder/index.json`. What is read is mapped, and mapped once, tied names together: a change
    made in place to a weight that was handed out on the CPU is there again the next time, and never reaches the file.
    Copies and pickles carry such changes; they read the rest from the same files, and raise ReplacedFileError (a
    RuntimeError) when these are others by then. `device` is where weights from the disk are put (default: they stay
    mapped on the CPU).

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
        if save_folder is not None and not os.path.isabs(save_folder):
            save_folder = os.path.abspath(save_folder)  # the working directory may change
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index: dict[str, Mapping[str, Any]] = dict(index)
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self.device = device
        self._mapped: dict[str, torch.Tensor] = {}  # by raw file, or by the name of a slice
        self._files: dict[str, SafetensorsStore] = {}
        self._identities: dict[str, tuple[int, ...]] = {}  # of every file that was used, by its path
        self._places: dict[str, str] = {}  # of safetensors files that the index names by a relative path
        self._raw_files: dict[str, str] = {}
        for info in self.index.values():
            if _is_slice(info):
                self._place_of(info)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        twin = self._unread()
        memo[id(self)] = twin
        kept = self._kept(twin)
        twin.__dict__.update(copy.deepcopy({**twin.__dict__, "_mapped": {}, "_files": {}}, memo))
        twin.state_dict.update(kept)
        twin.hold(name for name in twin.index if self._is_held(name))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        unread = self._unread()
        kept = self._kept(unread)
        unread.state_dict = {**self.state_dict, **kept}
        for name, info in self.index.items():
            file = self._place_of(info) if _is_slice(info) else self._raw_file(name)
            if name not in unread.state_dict and file not in unread._identities and os.path.exists(file):
                unread._identities[file] = file_identity(file)
        return {**unread.__dict__, "_mapped": {}, "_files": {}}  # maps stay behind, paths travel

    def shape(self, name: str) -> torch.Size:
        if name in self.state_dict:
            return self.state_dict[name].shape
        info = self.index[name]
        return (
            self._slices(info).shape(self._slice_name(name, info))
            if _is_slice(info)
            else self._raw_layout(name, info)[0]
        )

    def dtype(self, name: str) -> torch.dtype:
        if name in self.state_dict:
            return self.state_dict[name].dtype
        info = self.index[name]
        if not _is_slice(info):
            return self._raw_layout(name, info)[1]
        if info.get("dtype") is not None:
            return dtype_named(info["dtype"])
        return self._slices(info).dtype(self._slice_name(name, info))

    def source(self, name: str) -> FileSlice | None:
        info = self.index.get(name, {})
        if name in self.state_dict or not _is_slice(info):
            return None
        found = self._slices(info).source(self._slice_name(name, info))
        return found if found is not None and found.dtype == self.dtype(name) else None

    def file_of(self, name: str) -> str | None:
        """The file that the tensor is read from; None when it is in memory."""
        if name in self.state_dict:
            return None
        info = self.index[name]
        return self._place_of(info) if _is_slice(info) else self._raw_file(name)

    def alias_of(self, name: str) -> str:
        home = home_of(name, self.index.get(name, {}))
        own = name in self.state_dict or home in self.state_dict or home not in self.index
        return name if own or _is_slice(self.index[home]) else home

    def is_at_hand(self, name: str) -> bool:
        if name in self.state_dict:
            return True
        if self.device is not None:
            return False
        try:
            return not self._is_converted(name)
        except (OSError, ValueError, ReplacedFileError):  # who reads it will hear so
            return True

    def hold(self, names: Iterable[str] | None = None) -> None:
        """Map the files of `names` (default: all) now, so that replacing them later cannot change this model's weights."""
        for name in self.index if names is None else names:
            info = self.index.get(name)
            if info is None or name in self.state_dict:
                continue
            if _is_slice(info):
                self._slices(info)
            elif len(self._mapped) < _HELD_FILES:
                self._from_disk(name)
            else:
                file = self._raw_file(name)
                self._identities.setdefault(file, file_identity(file))

    def _from_disk(self, name: str) -> torch.Tensor:
        info = self.index[name]
        key = name if _is_slice(info) else self._raw_file(name)
        if key in self._mapped:
            return self._as_announced(name, info, self._mapped[key])
        if _is_slice(info):
            stored = self._slices(info)[self._slice_name(name, info)]
            tensor = stored if info.get("dtype") is None else stored.to(dtype_named(info["dtype"]))
            if tensor is not stored:
                return tensor  # converted: holding it would keep it in memory
        else:
            self._recognise(key, file_identity(key))
            tensor = read_raw(key, info)
        return self._mapped.setdefault(key, tensor)  # another thread may have been faster

    def _is_converted(self, name: str) -> bool:
        """Whether reading makes a tensor of another dtype than the file's."""
        info = self.index[name]
        if not _is_slice(info) or info.get("dtype") is None:
            return False
        return self._slices(info).dtype(self._slice_name(name, info)) != dtype_named(info["dtype"])

    def _raw_file(self, name: str) -> str:
        if self.save_folder is None:
            raise ValueError(
                f"the offload index says that {name!r} is in a folder, but no save_folder was given"
            )
        home = home_of(name, self.index[name])
        if home not in self._raw_files:
            self._raw_files[home] = stored_raw_file(self.save_folder, home)
        return self._raw_files[home]

    def _as_announced(self, name: str, info: Mapping[str, Any], shared: torch.Tensor) -> torch.Tensor:
        """A tensor that was mapped before; one that is tied to another may not claim another layout than it has."""
        if "same_as" in info and self._raw_layout(name, info) != (shared.shape, shared.dtype):
            raise ValueError(
                f"the offload index says that {name!r} is the same as {info['same_as']!r}, but of another shape or dtype"
            )
        return shared

    def _raw_layout(self, name: str, info: Mapping[str, Any]) -> tuple[torch.Size, torch.dtype]:
        try:
            return layout_of_entry(info)
        except ValueError as error:
            raise ValueError(f"the entry of {name!r} in the offload index is damaged: {error}") from error

    def _slice_name(self, name: str, info: Mapping[str, Any]) -> str:
        """What the tensor is called in its safetensors file, which has to hold it."""
        inside = str(info.get("weight_name", name))
        if inside not in self._slices(info):
            raise ValueError(
                f"the offload index says that {name!r} is {inside!r} in {self._place_of(info)}, but it is not there"
            )
        return inside

    def _slices(self, info: Mapping[str, Any]) -> SafetensorsStore:
        file = self._place_of(info)
        if file not in self._files:
            store = SafetensorsStore(file)
            self._recognise(file, store.identity)
            self._files.setdefault(file, store)
        return self._files[file]

    def _place_of(self, info: Mapping[str, Any]) -> str:
        """The absolute path of a safetensors file: found from the working directory, else beside the index."""
        file = os.fspath(info["safetensors_file"])
        if os.path.isabs(file):
            return file
        if file not in self._places:
            beside = None if self.save_folder is None else os.path.join(self.save_folder, file)
            self._places[file] = os.path.abspath(beside if beside and not os.path.exists(file) else file)
        return self._places[file]

    def _recognise(self, file: str, identity: tuple[int, ...]) -> None:
        if self._identities.setdefault(file, identity) != identity:
            raise ReplacedFileError(
                f"{file} was replaced after this model was offloaded, or is a copy of the file it was offloaded to; offload "
                "each model into a folder of its own, and offload again after moving the folder"
            )

    def _unread(self) -> OffloadedWeightsLoader:
        """A loader of the same files, which knows them but has opened none."""
        unread = object.__new__(type(self))
        unread.__dict__.update(self.__dict__)
        unread._mapped, unread._files = {}, {}
        unread._identities = dict(self._identities)
        return unread

    def _kept(self, unread: OffloadedWeightsLoader) -> dict[str, torch.Tensor]:
        """Copies of what `unread` would not find: tensors that were written to, or whose file is another one by now."""
        kept: dict[str, torch.Tensor] = {}
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        for name in self.index:
            if name in self.state_dict or not self._is_held(name):
                continue
            tensor = self._from_disk(name)
            if unread._gives(name, tensor):
                continue
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())  # tied names stay tied
            if view not in copies:
                copies[view] = tensor.detach().clone()
            kept[name] = copies[view]
        return kept

    def _is_held(self, name: str) -> bool:
        """Whether replacing the file would not change what this loader reads."""
        info = self.index[name]
        if _is_slice(info):
            return self._place_of(info) in self._files
        return self.save_folder is not None and self._raw_file(name) in self._mapped

    def _gives(self, name: str, tensor: torch.Tensor) -> bool:
        try:
            return same_bytes(self._from_disk(name), tensor)
        except (OSError, ValueError, ReplacedFileError):  # gone, damaged or replaced
            return False


def _is_slice(info: Mapping[str, Any]) -> bool:
    return info.get("safetensors_file") is not None
