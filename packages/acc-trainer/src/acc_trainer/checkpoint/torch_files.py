"""Files of torch.save, read with errors that name the file: cut off, or holding objects that could run code."""

from __future__ import annotations

import codecs
import pickle
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from acc_ops.callers import warn_caller
from acc_ops.optional import is_available, require

from .layout import CheckpointError

_trusting = threading.Lock()  # what torch trusts is one list of the process


def read_file(path: Path, load_kwargs: Mapping[str, Any]) -> Any:
    """What torch.load makes of it: on the CPU and plain data only, NumPy's arrays included, unless `load_kwargs` say otherwise.

    CheckpointError names the file, and for objects that could run code the way to trust them.
    """
    if not path.is_file():
        raise CheckpointError(f"the checkpoint {path.parent} is not whole: {path.name} is missing")
    whole = zipfile.is_zipfile(path)
    try:
        return _load(path, {"map_location": "cpu", "weights_only": True, **load_kwargs})
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError) and (whole or "GLOBAL" in str(error)):
            raise CheckpointError(
                f"{path} holds objects that could run code when they are loaded: {_refused(error) or reason}. If you trust it: name their "
                "classes in `with torch.serialization.safe_globals([...]):` around the call, or "
                "load_state(..., load_kwargs={'weights_only': False})"
            ) from error
        if whole and not isinstance(error, EOFError):
            raise CheckpointError(f"{path} cannot be loaded: {reason}") from error
        raise CheckpointError(
            f"the checkpoint {path.parent} is not whole: {path.name} is cut off or no file of torch.save ({reason})"
        ) from error


def read_random(path: Path) -> dict[str, Any]:
    """The random states of one rank; nothing, and a warning, when it cannot be read."""
    try:
        state = read_file(path, {})
    except CheckpointError as error:
        warn_caller(f"the random generators go on as they are: {error}")
        return {}
    if not isinstance(state, dict):
        warn_caller(f"the random generators go on as they are: {path} holds a {type(state).__name__}")
        return {}
    if not state:
        warn_caller(f"the random generators go on as they are: {path} holds none")
    return state


def _load(path: Path, options: Mapping[str, Any]) -> Any:
    try:
        return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        if not any(name in str(error) for name in ("numpy", "_codecs")) or not is_available("numpy"):
            raise
    with _trusting, torch.serialization.safe_globals(_arrays_of_numpy()):
        return torch.load(path, **options)


def _arrays_of_numpy() -> list[Any]:
    """What an array or a number of NumPy is pickled with, under its names in NumPy 1 and 2; none of it runs code of others."""
    numpy = require("numpy", "NumPy's arrays in a checkpoint")
    rebuilt = ((numpy.zeros(1).__reduce__()[0], "_reconstruct"), (numpy.float64(0).__reduce__()[0], "scalar"))
    named = [
        (made, f"numpy.{core}.multiarray.{name}") for made, name in rebuilt for core in ("core", "_core")
    ]
    kinds = {type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefdFD"}
    return [*named, numpy.ndarray, numpy.dtype, *kinds, codecs.encode]


def _refused(error: pickle.UnpicklingError) -> str | None:
    """The class that torch names in its long text."""
    found = next((line for line in str(error).splitlines() if "GLOBAL" in line), None)
    return (
        None
        if found is None
        else found.strip().split(" was not an allowed")[0].removeprefix("WeightsUnpickler error: ")
    )
