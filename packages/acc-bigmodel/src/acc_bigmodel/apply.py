"""Carry out the steps of a load: tensors into the model, converted bytes into the offload folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from acc_bigmodel.load_plan import LoadReport, LoadWishes, Step
from acc_bigmodel.placement import DISK
from acc_bigmodel.stores.folder import merge_index, replacing
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_bigmodel.stores.store import FileSlice, WeightStore
from acc_hooks.tensors import get_tensor, owner_of, put_tensor, set_module_tensor_to_device
from acc_ops.devices import canonical_device

OFFLOADED_FILE = "offloaded.safetensors"


def apply_steps(
    model: nn.Module, store: WeightStore, steps: Sequence[Step], report: LoadReport, wishes: LoadWishes
) -> LoadReport:
    """Load every tensor as planned; returns the report with what is on the disk.

    Raises ValueError, before the model changes, when something has to be written and there is no offload folder.
    """
    on_disk = [step for step in steps if step.home == DISK]
    index, written = _to_disk(store, on_disk, report.missing, wishes.offload_folder)
    for step in steps:
        if step.shared_with is None and step.home == DISK:
            set_module_tensor_to_device(model, step.name, "meta", dtype=step.dtype)
        elif step.shared_with is None:
            _to_device(model, store, step)
    for step in steps:
        if step.shared_with is not None:
            put_tensor(*owner_of(model, step.name), _tensor(model, step.shared_with))
    return replace(report, index=index, written_bytes=written)


def _to_device(model: nn.Module, store: WeightStore, step: Step) -> None:
    current = _tensor(model, step.name)
    here = current.device if current.device.type != "meta" else torch.device("cpu")
    device = here if step.home is None else canonical_device(step.home)
    value = store[step.source]
    if current.device == device and current.dtype == step.dtype:
        with torch.no_grad():
            current.copy_(value)
        return
    value = value.to(step.dtype)
    set_module_tensor_to_device(model, step.name, device, value=value, dtype=step.dtype, clear_cache=False)


def _to_disk(
    store: WeightStore,
    steps: Sequence[Step],
    missing: Sequence[str],
    folder: str | os.PathLike[str] | None,
) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The index of what is on the disk, and the bytes written for it."""
    index: dict[str, Mapping[str, Any]] = {}
    to_write: dict[str, Step] = {}
    for step in steps:
        source = store.source(step.source)
        if source is not None and source.dtype == step.dtype:
            index[step.name] = source.index_entry()
        elif step.shared_with is None or step.shared_with not in to_write:
            to_write[step.name] = step
    if to_write and folder is None:
        name = next(iter(to_write))
        raise ValueError(
            f"{len(to_write)} tensors for the disk cannot be used where they are (the first is {name!r}, in another dtype "
            "or not in a safetensors file): give an offload_folder for them"
        )
    if folder is None:
        return index, 0
    os.makedirs(folder, exist_ok=True)
    file = os.path.abspath(os.path.join(folder, OFFLOADED_FILE))
    written = _write(store, to_write, file) if to_write else 0
    for step in steps:
        if step.name not in index:
            home = step.name if step.name in to_write else step.shared_with or step.name
            index[step.name] = FileSlice(file=file, name=home, dtype=step.dtype).index_entry()
    gone = set(missing)  # the folder may hold them for another model

    def is_stale(name: str, info: Mapping[str, Any]) -> bool:
        return name in gone or bool(to_write and info.get("safetensors_file") == file)

    merge_index(folder, index, is_stale)
    return index, written


def _write(store: WeightStore, steps: Mapping[str, Step], file: str) -> int:
    """Replace the file: who mapped an earlier one keeps it."""
    entries = {
        name: Entry(shape=store.shape(step.source), dtype=step.dtype, read=_converted(store, step))
        for name, step in steps.items()
    }
    with replacing(file) as staged:
        return write_safetensors(staged, entries)


def _converted(store: WeightStore, step: Step) -> Callable[[], torch.Tensor]:
    return lambda: store[step.source].to(step.dtype)


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    tensor = get_tensor(model, name)
    assert tensor is not None, name  # the plan holds names of tensors only
    return tensor
