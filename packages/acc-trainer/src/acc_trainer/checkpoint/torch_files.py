"""Files of torch.save, read with errors that name the file: cut off, or holding objects that could run code."""

from __future__ import annotations

import codecs
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from acc_ops.optional import is_available, require

from .layout import CheckpointError


def read_file(path: Path, load_kwargs: Mapping[str, Any]) -> Any:
    """What torch.load makes of it: on the CPU and plain data only, unless `load_kwargs` say otherwise. CheckpointError names the file."""
    if not path.is_file():
        raise CheckpointError(f"the checkpoint {path.parent} is not whole: {path.name} is missing")
    whole = zipfile.is_zipfile(path)
    try:
        return torch.load(path, **{"map_location": "cpu", "weights_only": True, **load_kwargs})
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError) and (whole or "GLOBAL" in str(error)):
            raise CheckpointError(
                f"{path} holds objects that could run code when they are loaded: {reason} "
                "If you trust it: load_state(..., load_kwargs={'weights_only': False})"
            ) from error
        if whole and not isinstance(error, EOFError):
            raise CheckpointError(f"{path} cannot be loaded: {reason}") from error
        raise CheckpointError(
            f"the checkpoint {path.parent} is not whole: {path.name} is cut off or no file of torch.save ({reason})"
        ) from error


def check_file(path: Path) -> None:
    """CheckpointError unless torch.load can read it; large tensors are mapped, not read, where the format allows it."""
    read_file(path, {"mmap": True} if zipfile.is_zipfile(path) else {})


def read_random(path: Path) -> dict[str, Any]:
    """The random states of one rank; nothing, and a warning, when it cannot be read.

    accelerate's hold NumPy arrays, which torch trusts only when told to.
    """
    trusted: list[Any] = []
    if is_available("numpy"):
        numpy = require("numpy", "the random state of NumPy in a checkpoint")
        rebuild = numpy.zeros(1).__reduce__()[0]
        both = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
        trusted = [*both, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    try:
        with torch.serialization.safe_globals([*trusted, codecs.encode]):
            state = read_file(path, {})
    except CheckpointError as error:
        warnings.warn(f"the random generators go on as they are: {error}", stacklevel=6)
        return {}
    if not isinstance(state, dict):
        warnings.warn(
            f"the random generators go on as they are: {path} holds a {type(state).__name__}", stacklevel=6
        )
        return {}
    return state
