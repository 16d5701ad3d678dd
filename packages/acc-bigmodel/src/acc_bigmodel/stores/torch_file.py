"""Weights in a file written by torch.save, mapped where the file allows it."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from acc_bigmodel.stores.store import MemoryStore


class TorchFileStore(MemoryStore):
    """The tensors of a state dict written by torch.save; `others` are the names of entries that are no tensors.

    Only plain data is read (`weights_only=True`). Raises FileNotFoundError, or ValueError for a file that holds no state
    dict or cannot be read.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = os.path.abspath(os.fspath(file))
        if not os.path.isfile(self.file):
            raise FileNotFoundError(f"there is no weights file {self.file}")
        content = read_torch_file(self.file)
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{self.file} holds a {type(content).__name__}, not a state dict (names -> tensors)"
            )
        tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        self.others = [str(name) for name in content if name not in tensors]
        if self.others and not tensors:
            raise ValueError(
                f"{self.file} holds no tensors but {', '.join(map(repr, self.others[:5]))}; if the state dict is nested "
                "in one of them, save that one on its own"
            )
        super().__init__(tensors)

    def __repr__(self) -> str:
        return f"TorchFileStore({self.file!r})"


def read_torch_file(file: str) -> Any:
    """What torch.save wrote, on the CPU; only plain data is read. ValueError when it is more than that, or damaged."""
    # only the zip format (torch >= 1.6) can be mapped; an older file is read into memory
    mapped = zipfile.is_zipfile(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than plain tensors, and loading it could run code: {error}. If you trust it, load it with "
            "torch.load(weights_only=False) and save its state dict as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read as a torch.save file: {error}") from error
