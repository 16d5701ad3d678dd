"""Carry out the steps of a load: tensors into the model, converted bytes into the offload folder.

[Note: in which order]
Everything that can fail comes first: what has to be written goes to the disk, and every value that is new is made. Only
then the model changes: real tensors are copied into, and the new values are put in their places.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from acc_bigmodel.load_plan import LoadReport, LoadWishes, Step, extra_states
from acc_bigmodel.loading_bar import LoadingBar
from acc_bigmodel.placement import DISK
from acc_bigmodel.stores.folder import merge_index
from acc_bigmodel.stores.locking import replacing
from acc_bigmodel.stores.pieces import copy_jobs, give_back, run_all
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_bigmodel.stores.store import FileSlice, WeightStore
from acc_hooks.tensors import is_plain, owner_of, put_tensor, set_module_tensor_to_device
from acc_hooks.ties import every_tensor
from acc_ops.devices import canonical_device

OFFLOADED_FILE = "offloaded.safetensors"


def apply_steps(
    model: nn.Module, store: WeightStore, steps: Sequence[Step], report: LoadReport, wishes: LoadWishes
) -> LoadReport:
    """Load every tensor as planned; returns the report with what is on the disk.

    `store` must be nobody else's: pages that were read of it are given back. Raises ValueError, before the model changes,
    when something has to be written and there is no offload folder.
    """
    current = dict(every_tensor(model))
    own = [step for step in steps if step.shared_with is None]
    with LoadingBar() as bar:
        index, written = _to_disk(store, steps, report.missing, wishes.offload_folder, bar)
        values = _Values(store, bar)
        for step in own:
            if step.home != DISK:
                values.add(step, current[step.name])
        run_all(values.making)
        run_all(values.copying)
    for step in own:
        if step.home == DISK:
            set_module_tensor_to_device(model, step.name, "meta", dtype=step.dtype)
        elif step.name in values.made:
            value = values.made.pop(step.name)
            device = _device(step, current[step.name])
            set_module_tensor_to_device(
                model, step.name, device, value=value, dtype=step.dtype, clear_cache=False
            )
    loaded = dict(every_tensor(model))
    for step in steps:
        if step.shared_with is not None:
            put_tensor(*owner_of(model, step.name), loaded[step.shared_with])
            loaded[step.name] = loaded[step.shared_with]
    for name, module in extra_states(model).items():
        if name in store or name in store.others:
            module.set_extra_state(store[name] if name in store else store.others[name])
    where = {step.name: str(loaded[step.name].device) for step in steps}
    where.update((name, info["safetensors_file"]) for name, info in index.items())
    return replace(report, where=where, index=index, written_bytes=written)


class _Values:
    """What loading has to do for tensors in memory: `making` fills `made` with new values, `copying` changes old ones."""

    def __init__(self, store: WeightStore, bar: LoadingBar) -> None:
        self.store, self.bar = store, bar
        self.made: dict[str, torch.Tensor] = {}
        self.making: list[Callable[[], None]] = []
        self.copying: list[Callable[[], None]] = []

    def add(self, step: Step, current: torch.Tensor) -> None:
        device, stored = _device(step, current), self.store.peek(step.source)
        if current.device == device and current.dtype == step.dtype:
            self.copying += self._copies(current.detach(), stored, step)
        elif not is_plain(current):  # its class makes something else of what is stored
            self.made[step.name] = self.store[step.source]
        elif device.type != "cpu":
            self.bar.expect(stored.nbytes)
            self.making.append(functools.partial(self._move, step, stored, device))
        elif stored.dtype == step.dtype and self.store.is_at_hand(step.source):
            self.made[step.name] = stored
        else:
            value = torch.empty_like(stored, dtype=step.dtype, device="cpu")
            self.made[step.name] = value
            self.making += self._copies(value, stored, step)

    def _copies(self, target: torch.Tensor, stored: torch.Tensor, step: Step) -> list[Callable[[], None]]:
        self.bar.expect(stored.nbytes)
        return copy_jobs(target, stored, self.store.is_mapped(step.source), self.bar.advance)

    def _move(self, step: Step, stored: torch.Tensor, device: torch.device) -> None:
        self.made[step.name] = stored.detach().to(step.dtype).to(device)
        if self.store.is_mapped(step.source):
            give_back(stored)
        self.bar.advance(stored.nbytes)


def _device(step: Step, current: torch.Tensor) -> torch.device:
    if step.home is not None:
        return canonical_device(step.home)
    return current.device if current.device.type != "meta" else torch.device("cpu")


def _to_disk(
    store: WeightStore,
    steps: Sequence[Step],
    missing: Sequence[str],
    folder: str | os.PathLike[str] | None,
    bar: LoadingBar,
) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The index of what is on the disk, and the bytes written for it."""
    index: dict[str, Mapping[str, Any]] = {}
    to_write: dict[str, Step] = {}
    on_disk = [step for step in steps if step.home == DISK]
    for step in on_disk:
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
    written = _write(store, to_write, file, bar) if to_write else 0
    for step in on_disk:
        if step.name not in index:
            home = step.name if step.name in to_write else step.shared_with or step.name
            index[step.name] = FileSlice(file=file, name=home, dtype=step.dtype).index_entry()
    gone = set(missing)  # the folder may hold them for another model

    def is_stale(name: str, info: Mapping[str, Any]) -> bool:
        return name in gone or bool(to_write and info.get("safetensors_file") == file)

    merge_index(folder, index, is_stale)
    return index, written


def _write(store: WeightStore, steps: Mapping[str, Step], file: str, bar: LoadingBar) -> int:
    """Replace the file: who mapped an earlier one keeps it."""

    def written(mapped: bool, piece: torch.Tensor) -> None:
        if mapped:
            give_back(piece)
        bar.advance(piece.nbytes)

    entries = {}
    for name, step in steps.items():
        bar.expect(store.nbytes(step.source))
        entries[name] = Entry(
            shape=store.shape(step.source),
            dtype=step.dtype,
            read=functools.partial(store.peek, step.source),
            written=functools.partial(written, store.is_mapped(step.source)),
        )
    with replacing(file) as staged:
        return write_safetensors(staged, entries)
