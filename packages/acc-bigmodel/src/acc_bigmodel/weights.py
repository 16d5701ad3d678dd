"""The one door to ask where the tensors of a model are: on a device, in memory, or in which file; none is read for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from acc_bigmodel.budget import device_key
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.stores.disk import OffloadedWeightsLoader
from acc_bigmodel.stores.store import FileSlice, WeightStore
from acc_hooks.elsewhere import home_behind
from acc_hooks.placeholder import is_placeholder, value_behind
from acc_hooks.tensors import get_tensor
from acc_hooks.ties import every_tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor is: `device` is an index, "cpu", "disk" or another device; "meta" is nowhere, it has no values."""

    device: Device
    is_offloaded: bool = False  # it comes to the device that computes for the time of a forward
    file: str | None = None  # that it is read from, if it is on the disk
    slice: str | None = None  # what it is called in that file, if it is a safetensors file

    def __str__(self) -> str:
        part = "" if self.slice is None else f", {self.slice!r}"
        return f"{self.device}{'' if self.file is None else f' ({self.file}{part})'}"


def weights_of(model: nn.Module) -> ModelWeights:
    """The tensors of a model as a `WeightStore` that also knows the `place` of each, dispatched or not, at any time."""
    return ModelWeights(model)


class ModelWeights(WeightStore):
    """All parameters and buffers of one model, under each of their names; made by `weights_of`.

    Nothing is remembered: every answer is that of the moment. `weights[name]` is the real value where it is kept, which
    for one on the disk is a view of the mapped file.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        return value_behind(tensor) if is_placeholder(tensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in every_tensor(self._model))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self._tensor(name) is not None
        except KeyError:
            return False

    def shape(self, name: str) -> torch.Size:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def place(self, name: str) -> Place:
        """Where the tensor is."""
        tensor = self._tensor(name)
        if not is_placeholder(tensor):
            return Place(device=device_key(tensor.device))
        home = home_behind(tensor)
        if isinstance(home, torch.Tensor):
            return Place(device=device_key(home.device), is_offloaded=True)
        store, key = home
        source = self.source(name)
        if source is not None:
            return Place(device=DISK, is_offloaded=True, file=source.file, slice=source.name)
        if isinstance(store, OffloadedWeightsLoader):
            file = store.file_of(key)
            if file is not None:
                return Place(device=DISK, is_offloaded=True, file=file)
            store = store.state_dict
        kept = store[key] if isinstance(store, dict) else None
        return Place(device=CPU if kept is None else device_key(kept.device), is_offloaded=True)

    def source(self, name: str) -> FileSlice | None:
        found = self._in_map(name)
        if found is None or not isinstance(found[0], WeightStore):
            return None
        source = found[0].source(found[1])
        return source if source is not None and source.dtype == self.dtype(name) else None

    def alias_of(self, name: str) -> str:
        tensor = self._tensor(name)
        return next(other for other, found in every_tensor(self._model) if found is tensor)

    def aliases(self) -> dict[str, str]:
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in every_tensor(self._model)}

    def is_at_hand(self, name: str) -> bool:
        found = self._in_map(name)
        return found is None or not isinstance(found[0], WeightStore) or found[0].is_at_hand(found[1])

    def _in_map(self, name: str) -> tuple[Mapping[str, torch.Tensor], str] | None:
        """The weights map that keeps the tensor, and its key there; None for one that the model or a twin has."""
        tensor = self._tensor(name)
        home = home_behind(tensor) if is_placeholder(tensor) else tensor
        return None if isinstance(home, torch.Tensor) else home

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            tensor = get_tensor(self._model, name)
        except (AttributeError, KeyError):
            tensor = None
        if tensor is None:
            raise KeyError(f"{name!r} is no parameter or buffer of this {type(self._model).__name__}")
        return tensor
