"""A read-only mapping from tensor names to tensors that knows every shape, dtype and size without reading.

[Note: where a weight can be]
- in memory: `MemoryStore`
- a slice of a safetensors file, mapped and never copied: `SafetensorsStore`
- one raw file per tensor in an offload folder, or a safetensors slice its index points to: `OffloadedWeightsLoader`
- in a file written by torch.save: `TorchFileStore`
- spread over shards: `ChainedStore`
A tensor read from a file is a private view of the mapped file: reading it costs no anonymous memory, and writing to it
copies the touched pages, so that the file never changes. A tensor of a torch.save file is a copy instead: torch.save
writes over files in place, which would tear the mapped weights away.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from acc_bigmodel.stores.dtypes import name_of_dtype


@dataclass(frozen=True, kw_only=True)
class FileSlice:
    """One tensor inside one safetensors file."""

    file: str
    name: str
    dtype: torch.dtype

    def index_entry(self) -> dict[str, Any]:
        """How an offload index (index.json) refers to it."""
        return {"safetensors_file": self.file, "weight_name": self.name, "dtype": name_of_dtype(self.dtype)}


class ReplacedFileError(RuntimeError):
    """A file of weights is another one than when it was opened first."""


class WeightStore(Mapping[str, torch.Tensor]):
    """A lazy `Mapping[str, Tensor]`: `store[name]` reads (or maps) one tensor, the methods below read none.

    Every method raises KeyError for a name that the store does not hold. `others` are entries of the file that are no
    tensors, by name.
    """

    others: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """The shape of one tensor."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one tensor, as it is stored."""

    def nbytes(self, name: str) -> int:
        """The bytes of one tensor, as it is stored."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def source(self, name: str) -> FileSlice | None:  # noqa: ARG002
        """The safetensors slice that holds the tensor; None when it is anywhere else."""
        return None

    def alias_of(self, name: str) -> str:
        """The name under which the same stored tensor was saved first; `name` itself when it shares with none."""
        return name

    def aliases(self) -> dict[str, str]:
        """`alias_of` every name, in the order of the store."""
        return {name: self.alias_of(name) for name in self}

    def is_at_hand(self, name: str) -> bool:  # noqa: ARG002
        """Whether reading the tensor takes no time, as when it is in memory or mapped: fetching it ahead wins nothing."""
        return False

    def peek(self, name: str) -> torch.Tensor:
        """The tensor to be read once and not kept: mapped where `store[name]` would be a copy."""
        return self[name]

    def is_mapped(self, name: str) -> bool:  # noqa: ARG002
        """Whether `peek(name)` is a part of a mapped file, whose pages can be given back when they have been read."""
        return False


def file_identity(file: str | os.PathLike[str]) -> tuple[int, ...]:
    """What differs when a file was replaced or written to."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


class MemoryStore(WeightStore):
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> torch.Size:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def is_at_hand(self, name: str) -> bool:
        return name in self.tensors


class ChainedStore(WeightStore):
    """Several stores read as one.

    `homes` says which store to ask for which name (an index does); without it every name of every store counts, and a
    name in two of them is a ValueError.
    """

    def __init__(self, stores: Sequence[WeightStore], homes: Mapping[str, WeightStore] | None = None) -> None:
        self.stores = tuple(stores)
        self.others = {name: value for store in self.stores for name, value in store.others.items()}
        self._home: dict[str, WeightStore] = dict(homes or {})
        if homes is not None:
            return
        for store in self.stores:
            for name in store:
                other = self._home.setdefault(name, store)
                if other is not store:
                    raise ValueError(f"{name!r} is in two files of one checkpoint: {other!r} and {store!r}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._home[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def shape(self, name: str) -> torch.Size:
        return self._home[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._home[name].dtype(name)

    def source(self, name: str) -> FileSlice | None:
        return self._home[name].source(name)

    def alias_of(self, name: str) -> str:
        return self._home[name].alias_of(name)

    def is_at_hand(self, name: str) -> bool:
        return self._home[name].is_at_hand(name)

    def peek(self, name: str) -> torch.Tensor:
        return self._home[name].peek(name)

    def is_mapped(self, name: str) -> bool:
        return self._home[name].is_mapped(name)
