"""Safetensors files: read as mapped slices, written one tensor at a time."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from acc_bigmodel.stores.dtypes import layout_of_safetensors, safetensors_name, safetensors_shape
from acc_bigmodel.stores.pieces import in_pieces
from acc_bigmodel.stores.store import FileSlice, ReplacedFileError, WeightStore, file_identity
from acc_bigmodel.stores.strict_json import parse_json

_ALIGNMENT_BYTES = 64  # kernels round differently where weights are not aligned


class SafetensorsStore(WeightStore):
    """One safetensors file, mapped: a tensor is a view of the file, whatever its size.

    Names that the file's metadata calls the same tensor as a stored one (`{"head.weight": "embed.weight"}`, as shared
    tensors are saved) are entries like any other. Raises FileNotFoundError, or ValueError for a file that is not whole.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = os.path.abspath(os.fspath(file))
        if not os.path.isfile(self.file):
            raise FileNotFoundError(f"there is no weights file {self.file}")
        self.identity = file_identity(self.file)
        try:
            self._handle: Any = safe_open(self.file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file} is not a whole safetensors file: {error}") from error
        header = self._read_header()
        self.metadata: dict[str, str] = header.pop("__metadata__", {}) or {}  # it may be null
        self._entries = header
        self._home = dict(zip(header, header, strict=True))
        for name, other in self.metadata.items():
            if other in header and name not in header and name != "format":
                self._home[name] = other
        self._layout: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def __repr__(self) -> str:
        return f"SafetensorsStore({self.file!r})"

    def __reduce__(self) -> tuple[Callable[..., SafetensorsStore], tuple[str, tuple[int, ...]]]:
        return _open_again, (self.file, self.identity)  # the open file stays behind, the path travels

    def __getitem__(self, name: str) -> torch.Tensor:
        home = self._home[name]
        self._layout_of(home)  # of a dtype that torch does not have, the error should say so
        try:
            tensor: torch.Tensor = self._handle.get_tensor(home)
        except (
            SafetensorError,
            RuntimeError,
            TypeError,
        ) as error:  # a shape of no elements that torch cannot hold
            raise ValueError(f"{name!r} in {self.file} cannot be read: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def shape(self, name: str) -> torch.Size:
        return self._layout_of(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        return self._layout_of(name)[1]

    def source(self, name: str) -> FileSlice | None:
        return FileSlice(file=self.file, name=self._home[name], dtype=self.dtype(name))

    def alias_of(self, name: str) -> str:
        return self._home[name]

    def is_at_hand(self, name: str) -> bool:
        return name in self._home

    def is_mapped(self, name: str) -> bool:
        return name in self._home

    def _layout_of(self, name: str) -> tuple[torch.Size, torch.dtype]:
        layout = self._layout.get(name)
        if layout is None:
            entry = self._entries[self._home[name]]
            try:
                layout = layout_of_safetensors(entry["shape"], entry["dtype"])
            except ValueError as error:
                raise ValueError(f"{name!r} in {self.file}: {error}") from error
            self._layout[name] = layout
        return layout

    def _read_header(self) -> dict[str, dict[str, Any]]:
        """The header that the library has checked: sizes, dtypes and offsets fit each other and the file."""
        with open(self.file, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length)
        try:
            header: dict[str, dict[str, Any]] = parse_json(text)
        except ValueError as error:
            raise ValueError(
                f"{self.file} is not a whole safetensors file: in its header, {error}"
            ) from error
        if file_identity(self.file) != self.identity:
            raise ReplacedFileError(f"{self.file} was replaced while it was opened; open it again")
        return header


def _open_again(file: str, identity: tuple[int, ...]) -> SafetensorsStore:
    store = SafetensorsStore(file)
    if store.identity != identity:
        raise ReplacedFileError(f"{file} was replaced after the store that is copied here had opened it")
    return store


def check_format(store: SafetensorsStore) -> bool:
    """Whether the file says that it was written for torch; False when it says nothing.

    Raises ValueError for weights of TensorFlow or Flax, whose layout differs, and OSError for an unknown format.
    """
    written_for = store.metadata.get("format")
    if written_for in ("tf", "flax"):
        raise ValueError(
            f"{store.file} holds weights for {written_for!r}; convert them to torch's layout first"
        )
    if written_for not in (None, "pt"):
        raise OSError(f"{store.file} says that its format is {written_for!r}; only 'pt' can be loaded")
    return written_for is not None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor to be written: its layout, how to get it when its turn comes, and what to do with each part written.

    What is read in another dtype is converted, a piece at a time.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    written: Callable[[torch.Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Entry:
        """An entry for a tensor in memory."""
        return cls(shape=tensor.shape, dtype=tensor.dtype, read=lambda: tensor)


def write_safetensors(
    file: str | os.PathLike[str], entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None
) -> int:
    """Write one safetensors file, holding one tensor at a time; returns its size in bytes.

    The bytes are on the disk when this returns. The caller renames the file into place: a reader must never see a
    half-written one. Raises ValueError for a dtype that the format cannot hold, before anything is written.
    """
    header, places = header_of(entries, metadata)
    with Path(file).open("wb") as out:
        out.write(header)
        for name in places:
            _write_entry(out, name, entries[name])
        out.flush()
        os.fsync(out.fileno())
    return len(header) + sum(entry.nbytes for entry in entries.values())


def header_of(
    entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where behind it each tensor begins, in bytes and in the order of the file.

    Raises ValueError for a name or a dtype that the format cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    # the file has no gaps: what fills whole lines comes first and starts at one, the rest at multiples of its item size
    names = sorted(
        entries,
        key=lambda name: (entries[name].nbytes % _ALIGNMENT_BYTES != 0, -entries[name].dtype.itemsize),
    )
    at = 0
    for name in names:
        entry = entries[name]
        if name == "__metadata__":
            raise ValueError("a tensor cannot be called '__metadata__' in a safetensors file; rename it")
        try:
            kind, shape = safetensors_name(entry.dtype), safetensors_shape(entry.shape, entry.dtype)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text, {name: header[name]["data_offsets"][0] for name in names}


def _write_entry(out: BinaryIO, name: str, entry: Entry) -> None:
    tensor = entry.read().detach()
    if tensor.shape != entry.shape:
        raise ValueError(
            f"{name!r} was announced with the shape {tuple(entry.shape)} but has {tuple(tensor.shape)}"
        )
    if entry.written is None and tensor.dtype == entry.dtype:
        write_bytes(out, tensor)
        return
    for (piece,) in in_pieces(tensor):
        write_bytes(out, piece.to(entry.dtype))
        if entry.written is not None:
            entry.written(piece)


def write_bytes(out: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the values of a tensor, in row order, without a second copy of them."""
    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if tensor.numel():
        out.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
