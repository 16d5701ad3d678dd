"""Write and read objects and tensors, once per world."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from acc_ops.logging import get_logger
from acc_ops.modules import id_tensor_storage
from acc_ops.optional import is_available, require
from acc_ops.world import World, current_world

logger = get_logger(__name__)

# torch keeps one list of allowed classes for the process, so that changing it for the time of one call must not overlap
_ALLOWING = threading.Lock()


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    world: World | None = None,
) -> None:
    """Write `obj` to a path or a binary file, on the main rank only, or on the first rank of each machine with `save_on_each_node`.

    By torch.save, or as safetensors with `safe_serialization`: then `obj` maps names to tensors, and tensors that share storage are written once.
    """
    world = current_world() if world is None else world
    if not (world.is_local_main if save_on_each_node else world.is_main):
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    require("numpy", "writing safetensors")  # safetensors needs it for every tensor
    safetensors = require("safetensors.torch", "writing safetensors")
    tensors = clean_state_dict_for_safetensors(obj)
    if isinstance(f, (str, os.PathLike)):
        safetensors.save_file(tensors, os.fspath(f), metadata={"format": "pt"})
    else:
        f.write(safetensors.save(tensors, metadata={"format": "pt"}))


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load with `weights_only=True` unless told otherwise, and with the numpy classes allowed that states of random generators need.

    The allow-list is afterwards as it was before. Keyword arguments are torch.load's.
    """
    kwargs.setdefault("weights_only", True)
    with _numpy_allowed() if kwargs["weights_only"] else contextlib.nullcontext():
        return torch.load(f, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict fit for safetensors: of several names for one tensor the first stays (a warning lists the others), and all are contiguous.

    Different views of one storage are all kept, as copies. Text values stay.
    """
    first_of: dict[Any, str] = {}
    storages: set[Any] = set()
    cleaned: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            cleaned[name] = value
            continue
        storage = id_tensor_storage(value)
        view = (storage, value.data_ptr(), value.dtype, tuple(value.shape), _stride(value))
        if value.numel() > 0 and view in first_of:
            dropped[name] = first_of[view]
            continue
        first_of[view] = name
        tensor = value.contiguous()
        cleaned[name] = tensor.clone() if storage in storages and tensor is value else tensor
        storages.add(storage)
    if dropped:
        pairs = ", ".join(f"{name} (is {kept})" for name, kept in dropped.items())
        logger.warning("left out of the safetensors file, as each is another name of one tensor: %s", pairs)
    return cleaned


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


@contextlib.contextmanager
def _numpy_allowed() -> Any:
    classes = _numpy_classes()
    if not classes:
        yield
        return
    with _ALLOWING, torch.serialization.safe_globals(classes):
        yield


def _numpy_classes() -> list[Any]:
    """What the pickle of a numpy array of 32-bit integers (a generator's state) names; nothing without numpy."""
    if not is_available("numpy"):
        return []
    numpy = importlib.import_module("numpy")
    core = (
        "numpy._core.multiarray"
        if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0"
        else "numpy.core.multiarray"
    )
    reconstruct = importlib.import_module(core)._reconstruct
    return [reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32)), codecs.encode]
