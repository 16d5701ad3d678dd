"""Weights in a file written by torch.save: mapped while they are read, copied when they are handed out."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from acc_bigmodel.stores.store import MemoryStore, ReplacedFileError, file_identity

# what unpickling bytes that are no pickle may end in
_UNREADABLE = (
    RuntimeError,
    EOFError,
    OSError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
    struct.error,
)


class TorchFileStore(MemoryStore):
    """The tensors of a state dict written by torch.save; `others` are the entries that are no tensors.

    A tensor is a copy each time it is asked for: torch.save writes over a file in place, and who had mapped it would be
    left without weights. Only plain data is read (`weights_only=True`). Raises FileNotFoundError, or ValueError for a file
    that holds no state dict of plain tensors or cannot be read; reading from it later raises ReplacedFileError when the
    file has been written to.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = os.path.abspath(os.fspath(file))
        if not os.path.isfile(self.file):
            raise FileNotFoundError(f"there is no weights file {self.file}")
        self._identity = file_identity(self.file)
        # only the zip format (torch >= 1.6) can be mapped; an older file is read into memory
        self._is_mapped = _is_zip(self.file)
        content = read_torch_file(self.file, mapped=self._is_mapped)
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{self.file} holds a {type(content).__name__}, not a state dict (names -> tensors)"
            )
        tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        self.others = {str(name): value for name, value in content.items() if name not in tensors}
        if self.others and not tensors:
            raise ValueError(
                f"{self.file} holds no tensors but {', '.join(map(repr, list(self.others)[:5]))}; if the state dict is nested "
                "in one of them, save that one on its own"
            )
        self._first: dict[str, str] = {}
        first_with: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            _check_plain(self.file, name, tensor)
            view = (tensor.data_ptr() or name, tensor.dtype, tensor.shape, tensor.stride())
            self._first[name] = first_with.setdefault(view, name)
        if self._is_mapped:
            _check_storages(self.file, tensors)
        super().__init__(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.peek(name)
        return tensor.detach().clone() if self._is_mapped else tensor

    def peek(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        if self._is_mapped and not self._is_untouched():
            raise ReplacedFileError(f"{self.file} was written to after it was opened; open it again")
        return tensor

    def is_mapped(self, name: str) -> bool:
        return name in self.tensors and self._is_mapped

    def __repr__(self) -> str:
        return f"TorchFileStore({self.file!r})"

    def alias_of(self, name: str) -> str:
        return self._first[name]

    def is_at_hand(self, name: str) -> bool:
        return name in self.tensors and not self._is_mapped

    def _is_untouched(self) -> bool:
        return os.path.exists(self.file) and file_identity(self.file) == self._identity


def read_torch_file(file: str, mapped: bool = False) -> Any:
    """What torch.save wrote, on the CPU; only plain data is read. ValueError when it is more than that, or damaged."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than plain tensors, and loading it could run code: {error}. If you trust it, name its "
            "classes in `with torch.serialization.safe_globals([...]):` around the call, or load it with "
            "torch.load(weights_only=False) and save its state dict as safetensors"
        ) from error
    except _UNREADABLE as error:
        raise ValueError(
            f"{file} cannot be read as a torch.save file: {type(error).__name__} {error}"
        ) from error


def _is_zip(file: str) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file} is a damaged zip archive: {error}") from error


def _check_plain(file: str, name: object, tensor: torch.Tensor) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{file} has a tensor called {name!r}, a {type(name).__name__}: names must be text")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name!r} in {file} is a tensor of layout {tensor.layout}; save its to_dense()")
    if tensor.is_quantized:
        raise ValueError(
            f"{name!r} in {file} is a quantized tensor ({tensor.dtype}), which has a scale beside its numbers; save its "
            "dequantize(), or its int_repr() and what belongs to it"
        )
    if tensor.is_meta:
        raise ValueError(f"{name!r} in {file} was on the meta device when it was saved, and has no values")


def _check_storages(file: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless the memory behind each tensor is one record of the file, as a whole.

    The sizes of storages stand in the pickle: one that lies about them would get bytes of other tensors, or of no tensor.
    """
    try:
        sizes = _record_sizes(file)
    except (*_UNREADABLE, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is a damaged zip archive: {error}") from error
    storages = [
        (storage.data_ptr(), storage.nbytes(), name)
        for name, tensor in tensors.items()
        if (storage := tensor.untyped_storage()).nbytes()
    ]
    if not storages:
        return
    wrong = storages[0][2]
    # where the mapping begins is not known: try with which record the first one fits
    for offset, size in sizes.items():
        base = storages[0][0] - offset
        if size != storages[0][1] or base % mmap.PAGESIZE:
            continue
        wrong = next((name for at, size, name in storages if sizes.get(at - base) != size), "")
        if not wrong:
            return
    raise ValueError(f"{wrong!r} in {file} is said to have another size than it has; the file is damaged")


def _record_sizes(file: str) -> dict[int, int]:
    """The bytes of the records of a zip file that are not compressed, by where their content starts."""
    sizes = {}
    with zipfile.ZipFile(file) as archive, open(file, "rb") as content:
        for record in archive.infolist():
            # APPNOTE.TXT, 4.3.7: the lengths of the name and of the extra field
            content.seek(record.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", content.read(4))
            if record.compress_type == zipfile.ZIP_STORED:
                sizes[record.header_offset + 30 + name_bytes + extra_bytes] = record.file_size
    return sizes
