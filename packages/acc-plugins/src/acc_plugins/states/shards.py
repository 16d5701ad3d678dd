"""Folders of torch.distributed.checkpoint, read tensor by tensor and slice by slice, by one rank or many, of any number that wrote them.

[Note: why not torch's own reader] It unpickles whatever stands in `.metadata` and in entries that are no tensors. Here only the classes that a folder
consists of are made, entries are plain data, and a path cannot leave the folder. It also needs all ranks and a state of the right layout;
here a rank asks for its own slice of a tensor, whatever the slices are in which it was saved.
Format: torch.distributed.checkpoint's FileSystemWriter (torch 2.6 to 2.13), tensors by torch.save.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from acc_bigmodel.stores.store import WeightStore

METADATA = ".metadata"
Key = tuple[
    Any, ...
]  # where an entry stood in the nested state: ("model", "layer.weight"), ("optimizer", "param_groups", 0, "lr")
Box = tuple[tuple[int, ...], tuple[int, ...]]  # a slice: offsets and sizes, one of each per dimension

_CLASSES = {  # module -> what of it a `.metadata` may name
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_DAMAGED = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError)


class ShardFolder:
    """One folder: `tensors` and `values` (the entries that are no tensors) by the place they had in the nested state that was saved."""

    def __init__(self, folder: str | Path) -> None:
        """Read what the folder holds, no tensor of it. FileNotFoundError without `.metadata`; ValueError for what cannot be read or trusted."""
        self.folder = Path(folder)
        metadata = _read_metadata(self.folder)
        places: Mapping[str, Key] = metadata.planner_data or {}
        self._stored: dict[str, dict[tuple[int, ...], Any]] = {}
        for index, info in (metadata.storage_data or {}).items():
            self._stored.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        self._flat: dict[Key, str] = {}
        self.tensors: dict[Key, Any] = {}
        self.values: dict[Key, Any] = {}
        for flat, described in metadata.state_dict_metadata.items():
            key = tuple(places.get(flat, (flat,)))
            self._flat[key] = flat
            if hasattr(described, "chunks"):
                self.tensors[key] = described
            else:
                self.values[key] = self._value(flat)

    def shape(self, key: Key) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.tensors[key].size)

    def dtype(self, key: Key) -> torch.dtype:
        """Its dtype, as it was saved."""
        dtype: torch.dtype = self.tensors[key].properties.dtype
        return dtype

    def read(self, key: Key, box: Box | None = None) -> Tensor:
        """The whole tensor, or a slice of it, as new memory on the CPU."""
        sizes = tuple(self.shape(key)) if box is None else box[1]
        return self.read_into(torch.empty(sizes, dtype=self.dtype(key)), key, box)

    def read_into(self, target: Tensor, key: Key, box: Box | None = None) -> Tensor:
        """Write the tensor, or the slice of it that `target` stands for, into `target`, chunk by chunk. ValueError where the folder lacks a part."""
        whole = tuple(self.shape(key))
        offsets, sizes = box or ((0,) * len(whole), whole)
        filled = 0
        for start, info in self._stored.get(self._flat[key], {}).items():
            chunk = next((one for one in self.tensors[key].chunks if tuple(one.offsets) == start), None)
            common = None if chunk is None else _overlap((offsets, sizes), (start, tuple(chunk.sizes)))
            if chunk is None or common is None:
                continue
            piece = self._chunk(info, tuple(chunk.sizes), self._flat[key])
            with torch.no_grad():
                _narrowed(target, offsets, common).copy_(_narrowed(piece, start, common))
            filled += math.prod(common[1])
        if filled != math.prod(sizes):
            raise ValueError(
                f"{self.folder} lacks a part of {self._flat[key]}: the folder is damaged, or was written by other ranks than its .metadata"
            )
        return target

    def _chunk(self, info: Any, sizes: tuple[int, ...], name: str) -> Tensor:
        tensor = self._load(info, name)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise ValueError(
                f"{self._file(info)} does not hold {name} in the size that {METADATA} says ({sizes})"
            )
        return tensor

    def _value(self, flat: str) -> Any:
        for info in self._stored.get(flat, {}).values():
            return self._load(info, flat)
        raise ValueError(f"{self.folder} names {flat} but holds no value for it")

    def _load(self, info: Any, name: str) -> Any:
        file = self._file(info)
        with file.open("rb") as opened:
            opened.seek(info.offset)
            content = opened.read(info.length)
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{name} in {file} holds objects that torch does not load from an untrusted file: {error}. If you trust it, name their "
                "classes with torch.serialization.add_safe_globals([...]) first"
            ) from error
        except (RuntimeError, EOFError, ValueError, LookupError) as error:
            raise ValueError(f"{name} cannot be read from {file}: {str(error).splitlines()[0]}") from error

    def _file(self, info: Any) -> Path:
        name = PurePath(str(info.relative_path))
        file = self.folder / name
        home = self.folder.resolve()
        if len(name.parts) != 1 or not file.resolve().is_relative_to(home):
            raise ValueError(
                f"{self.folder / METADATA} names a file outside of its folder: {info.relative_path!r}"
            )
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{file} is compressed ({info.transform_descriptors}), which is not read here: save it without extensions"
            )
        if not file.is_file():
            raise ValueError(f"{self.folder} is not whole: {name} is missing")
        return file


class ShardStore(WeightStore):
    """The weights of a folder by their names in the model, each read (whole) when it is asked for."""

    def __init__(self, folder: ShardFolder) -> None:
        self.folder = folder
        keys = [*folder.tensors, *folder.values]
        top = {key[0] for key in keys}
        depth = 1 if top == {"model"} and all(len(key) > 1 for key in keys) else 0
        self._keys = {".".join(map(str, key[depth:])): key for key in folder.tensors}
        self.others = {".".join(map(str, key[depth:])): value for key, value in folder.values.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.folder.read(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def shape(self, name: str) -> torch.Size:
        return self.folder.shape(self._keys[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.folder.dtype(self._keys[name])

    def read_into(self, target: Tensor, name: str, box: Box | None = None) -> Tensor:
        """Write the tensor, or the slice that `target` stands for, into `target`."""
        return self.folder.read_into(target, self._keys[name], box)


def is_shard_folder(folder: str | Path) -> bool:
    """Whether the folder was written by torch.distributed.checkpoint, and to its end: `.metadata` comes last."""
    return Path(folder, METADATA).is_file()


class _Unpickler(pickle.Unpickler):
    """Makes only what a `.metadata` consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module.split(".")[0] == "pathlib" and name in (
            "PosixPath",
            "WindowsPath",
            "PurePosixPath",
            "PureWindowsPath",
        ):
            return PurePath  # the folder's name when it was written: of no use, and of no harm
        if (module, name) == ("builtins", "getattr"):
            return _member  # how some versions of Python pickle an enum
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


def _member(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")


def _read_metadata(folder: Path) -> Any:
    file = folder / METADATA
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {METADATA}: it was not written by torch.distributed.checkpoint, or not to its end"
        )
    with file.open("rb") as opened:
        try:
            metadata = _Unpickler(opened).load()
        except _DAMAGED as error:
            raise ValueError(f"{file} cannot be read or trusted: {error}") from error
    if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise ValueError(f"{file} is not the metadata of a checkpoint but a {type(metadata).__name__}")
    return metadata


def _overlap(one: Box, other: Box) -> Box | None:
    """The slice that two slices have in common; None when they have nothing in common."""
    offsets = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def _narrowed(tensor: Tensor, start: tuple[int, ...], box: Box) -> Tensor:
    """The part `box` of a tensor that begins at `start` of the whole."""
    for dim, (offset, size, begin) in enumerate(zip(*box, start, strict=True)):
        tensor = tensor.narrow(dim, offset - begin, size)
    return tensor
