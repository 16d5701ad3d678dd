"""Carry out the steps of a load: tensors into the model, converted bytes into the offload folder.

[Note: in which order]
Everything that can fail comes first (`prepare`): what has to be written goes to the disk, and every value that is new is made.
Only then (`commit`) the folder's index and the model change: real tensors are copied into, and the new values are put in
their places. Ranks that load together tell each other in between.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acc_bigmodel.load_plan import LoadReport, LoadWishes, Step, extra_states
from acc_bigmodel.loading_bar import LoadingBar
from acc_bigmodel.placement import DISK
from acc_bigmodel.quantized import is_8bit, offload_8bit
from acc_bigmodel.stores.folder import known_entries, merge_index, raw_file, statistics_of
from acc_bigmodel.stores.locking import replacing
from acc_bigmodel.stores.pieces import copy_jobs, give_back, run_all
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_bigmodel.stores.store import FileSlice, WeightStore
from acc_hooks.tensors import is_plain, owner_of, put_tensor, set_module_tensor_to_device
from acc_hooks.ties import every_tensor
from acc_ops.devices import canonical_device
from acc_ops.exchange import tried

_CONVERTED = "offloaded-*.safetensors"  # in an offload folder; each load has a file of its own


def apply_steps(
    model: nn.Module, store: WeightStore, steps: Sequence[Step], report: LoadReport, wishes: LoadWishes
) -> LoadReport:
    """Load every tensor as planned; returns the report with what is on the disk.

    `store` must be nobody else's: pages that were read of it are given back. The caller has the offload folder alone
    (`offloading_into`). Raises ValueError, before the model changes, when something has to be written and there is none.
    """
    with ready_to_apply(model, store, steps, report, wishes) as ready:
        ready.prepare()
        return ready.commit()


@contextlib.contextmanager
def ready_to_apply(
    model: nn.Module, store: WeightStore, steps: Sequence[Step], report: LoadReport, wishes: LoadWishes
) -> Iterator[ReadyLoad]:
    """What `apply_steps` does, in two calls between which a rank can hear whether the others can go on."""
    with contextlib.ExitStack() as held:
        yield ReadyLoad(model, store, steps, report, wishes, held)


class ReadyLoad:
    """A load in two calls, `prepare` and then `commit`, each made alone in the offload folder; without the second nothing has happened.

    What was written lies in a staged file in between, which others do not delete. Made by `ready_to_apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        store: WeightStore,
        steps: Sequence[Step],
        report: LoadReport,
        wishes: LoadWishes,
        held: contextlib.ExitStack,
    ) -> None:
        self._model, self._store, self._wishes = model, store, wishes
        self._steps, self._report = steps, report
        self._current = dict(every_tensor(model))
        self._bar = held.enter_context(LoadingBar())
        self._staged = held.enter_context(contextlib.ExitStack())
        self._values = _Values(store, self._bar)
        self._index: dict[str, Mapping[str, Any]] = {}
        self._written = 0

    def prepare(self) -> None:
        """Everything that can fail: what has to be written is staged, and every value that is new is made."""
        store, steps, wishes = self._store, self._steps, self._wishes
        self._index, self._written = _to_disk(store, steps, wishes.offload_folder, self._bar, self._staged)
        in_8_bits = _quantise(store, steps, self._current, wishes, self._bar)
        self._index.update(in_8_bits)
        self._written += sum(
            os.path.getsize(_file_of(name, info, wishes)) for name, info in in_8_bits.items()
        )
        for step in steps:
            if step.shared_with is None and step.home != DISK:
                self._values.add(step, self._current[step.name])
        run_all(self._values.making)
        self._values.making.clear()  # which hold what they have read

    def commit(self) -> LoadReport:
        """Change the folder and then the model; returns the whole report."""
        self._staged.close()
        folder = self._wishes.offload_folder
        if folder is not None:
            gone = set(self._report.missing)  # the folder may hold them for another model
            merge_index(folder, self._index, lambda name, _: name in gone)
            _delete_unused(folder)
        self._values.copy()
        loaded = self._put()
        where = {step.name: str(loaded[step.name].device) for step in self._steps}
        where.update(
            (name, _file_of(name, info, self._wishes)) for name, info in self._index.items() if name in where
        )
        return replace(self._report, where=where, index=self._index, written_bytes=self._written)

    def _put(self) -> dict[str, torch.Tensor]:
        """The new tensors into the model; returns all that it has then."""
        model, current, made = self._model, self._current, self._values.made
        for step in self._steps:
            if step.shared_with is not None:
                continue
            if step.home == DISK:
                empty = None
                if is_8bit(current[step.name]):
                    empty = torch.empty(current[step.name].shape, dtype=step.dtype, device="meta")
                set_module_tensor_to_device(model, step.name, "meta", value=empty, dtype=step.dtype)
            elif step.name in made:
                value, device = made.pop(step.name), _device(step, current[step.name])
                set_module_tensor_to_device(
                    model, step.name, device, value=value, dtype=step.dtype, clear_cache=False
                )
        loaded = dict(every_tensor(model))
        for step in self._steps:
            if step.shared_with is not None:
                put_tensor(*owner_of(model, step.name), loaded[step.shared_with])
                loaded[step.name] = loaded[step.shared_with]
        for name, module in extra_states(model).items():
            if name in self._store or name in self._store.others:
                module.set_extra_state(self._store[name] if name in self._store else self._store.others[name])
        return loaded


class _Values:
    """What loading has to do for tensors in memory: `making` fills `made` with new values, `copying` changes old ones."""

    def __init__(self, store: WeightStore, bar: LoadingBar) -> None:
        self.store, self.bar = store, bar
        self.made: dict[str, torch.Tensor] = {}
        self.making: list[Callable[[], None]] = []
        self.copying: list[Callable[[], None]] = []
        self._doubtful: list[tuple[torch.Tensor, list[Callable[[], None]]]] = []

    def add(self, step: Step, current: torch.Tensor) -> None:
        device, stored = _device(step, current), self.store.peek(step.source)
        if current.device == device and current.dtype == step.dtype:
            if _is_expanded(current):
                raise ValueError(
                    f"{step.name!r} is an expanded view in the model, several of its numbers are one in memory, so nothing can "
                    "be loaded into it: give it memory of its own with contiguous()"
                )
            copies = self._copies(current.detach(), stored, step)
            if is_plain(current):
                self.copying += copies
            else:
                self._doubtful.append((current, copies))
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

    def copy(self) -> None:
        """Write into the tensors that stay. Only the classes of others may refuse: these come first, and get back what they had."""
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for target, copies in self._doubtful:
                before.append((target, target.detach().clone()))
                run_all(copies)
        except BaseException:
            with torch.no_grad():
                for target, value in before:
                    tried(functools.partial(target.copy_, value))  # the one that refused may refuse again
            raise
        run_all(self.copying)

    def _copies(self, target: torch.Tensor, stored: torch.Tensor, step: Step) -> list[Callable[[], None]]:
        self.bar.expect(stored.nbytes)
        return copy_jobs(target, stored, self.store.is_mapped(step.source), self.bar.advance)

    def _move(self, step: Step, stored: torch.Tensor, device: torch.device) -> None:
        self.made[step.name] = stored.detach().to(step.dtype).to(device)
        if self.store.is_mapped(step.source):
            give_back(stored)
        self.bar.advance(stored.nbytes)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several numbers of the tensor are one in memory."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _device(step: Step, current: torch.Tensor) -> torch.device:
    if step.home is not None:
        return canonical_device(step.home)
    return current.device if current.device.type != "meta" else torch.device("cpu")


def _to_disk(
    store: WeightStore,
    steps: Sequence[Step],
    folder: str | os.PathLike[str] | None,
    bar: LoadingBar,
    staged: contextlib.ExitStack,
) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The index of what is on the disk, and the bytes written for it, into a file that appears when `staged` is closed."""
    index: dict[str, Mapping[str, Any]] = {}
    to_write: dict[str, Step] = {}
    on_disk = [step for step in steps if step.home == DISK and not step.is_quantised]
    on_disk += [
        replace(step, name=statistics_of(step.name), source=step.statistics, dtype=torch.float32)
        for step in on_disk
        if step.statistics is not None
    ]
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
    known_entries(folder)  # raises for an index that nothing can be merged into
    file = os.path.abspath(os.path.join(folder, _CONVERTED.replace("*", secrets.token_hex(8))))
    written = _write(store, to_write, staged.enter_context(replacing(file)), bar) if to_write else 0
    for step in on_disk:
        if step.name not in index:
            home = step.name if step.name in to_write else step.shared_with or step.name
            index[step.name] = FileSlice(file=file, name=home, dtype=step.dtype).index_entry()
    return index, written


def _quantise(
    store: WeightStore,
    steps: Sequence[Step],
    current: Mapping[str, torch.Tensor],
    wishes: LoadWishes,
    bar: LoadingBar,
) -> dict[str, dict[str, Any]]:
    """The index of what was quantised to 8 bits, and written to the offload folder."""
    chosen = {step.name: step for step in steps if step.is_quantised}
    if not chosen:
        return {}
    assert wishes.offload_folder is not None, "load_checkpoint_in_model asks for one"

    def values() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, step in chosen.items():
            value = store.peek(step.source)
            bar.expect(value.nbytes)
            yield name, current[name], value
            if store.is_mapped(step.source):
                give_back(value)
            bar.advance(value.nbytes)

    return offload_8bit(wishes.offload_folder, chosen, values(), wishes.dtype)


def _file_of(name: str, info: Mapping[str, Any], wishes: LoadWishes) -> str:
    """The file that an entry of the index speaks of."""
    if "safetensors_file" in info:
        return str(info["safetensors_file"])
    return raw_file(os.path.abspath(wishes.offload_folder or ""), name)


def _delete_unused(folder: str | os.PathLike[str]) -> None:
    """Delete the converted weights of which the index names none any more; who has mapped them keeps them."""
    entries = known_entries(folder).values()
    used = {os.path.basename(os.fspath(info.get("safetensors_file") or "")) for info in entries}
    for file in Path(folder).glob(_CONVERTED):
        if file.name not in used and re.fullmatch(r"offloaded-[0-9a-f]{16}\.safetensors", file.name):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows keeps an open file
                file.unlink()


def _write(store: WeightStore, steps: Mapping[str, Step], file: str, bar: LoadingBar) -> int:
    """Write the converted tensors to `file`; returns its bytes."""

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
    return write_safetensors(file, entries)
