"""Weights to files: whole or in shards, readable by everybody, with nothing stale left beside them.

[Note: how a save survives a kill]
Every file is first written and synced in `.NAME.writing/`. Only then they are renamed into place, an index last, and the
files of an earlier save of the same name go. Shards that replace shards of the same names first take the old index away:
a kill in that moment leaves a folder that refuses to load, never a mixture. One save of a name at a time writes into a
folder, another one waits; whoever has the lock clears up what a killed one has left.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from acc_bigmodel.checkpoint_files import (
    COMMITTING,
    INDEX,
    SAFETENSORS,
    TORCH,
    find_weights,
    open_files,
    shard_name,
    shards_in,
    staging_name,
    stem_of,
)
from acc_bigmodel.stores.locking import locked
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_bigmodel.stores.store import WeightStore
from acc_ops.units import convert_file_size_to_int

logger = logging.getLogger(__name__)


def save_weights(
    state: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    name: str,
    max_shard_size: int | str | None = None,
    safe: bool = True,
) -> list[str]:
    """Write `state` as `NAME.safetensors` (or, with `safe=False`, by torch.save); returns the names of the files.

    More than `max_shard_size` (bytes, or "10GB") makes shards `NAME-00001-of-0000N` and an index, which comes last. Names
    that share one tensor share it in the file too. Other files of an earlier save of the same name, in either format, are
    removed; nothing else is touched. One tensor at a time is in memory when `state` is a `WeightStore`. What is no tensor
    (a module's extra state; the `others` of a store) goes into the first torch file. Where `safe`, a warning names what is left
    out of a store.

    Raises RuntimeError for a tensor on the meta device, TypeError for an entry that is no tensor where `safe`,
    NotADirectoryError when `folder` is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; weights are saved into a folder")
    if not name or Path(name).name != name:
        raise ValueError(f"the name of the weights must be a plain file name, got {name!r}")
    tensors, others = (state, {}) if safe else _tensors_and_others(state)
    if safe and isinstance(state, WeightStore) and state.others:
        logger.warning(
            "left out of %s, because safetensors files hold tensors only: %s", folder, ", ".join(state.others)
        )
    items = checked_items(tensors)
    limit = None if max_shard_size is None else convert_file_size_to_int(max_shard_size)
    shards = _split(items, limit)
    stem, kind = stem_of(name, safe), SAFETENSORS if safe else TORCH
    files = [
        f"{stem}{kind}" if len(shards) == 1 else shard_name(stem, i, len(shards), kind)
        for i in range(1, len(shards) + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, f"{staging_name(name)}.lock"):
        staging = _fresh_staging(folder / staging_name(stem))
        try:
            for file, shard in zip(files, shards, strict=True):
                _write(staging / file, shard, state, safe, others if file == files[0] else {})
            index = _write_index(staging / f"{stem}{kind}{INDEX}", files, shards) if len(shards) > 1 else None
            _commit(folder, staging, files, index)
        except BaseException:
            # with the mark it must stay: the folder may hold a mixture of shards
            if not (staging / COMMITTING).exists():
                shutil.rmtree(staging, ignore_errors=True)
            raise
        written = files + ([index] if index else [])
        _remove_stale(folder, name, set(written))
    return written


def load_weights(folder: str | os.PathLike[str], name: str) -> dict[str, torch.Tensor]:
    """What `save_weights` wrote under `name`: every tensor by name, on the CPU, mapped from its file.

    Names that shared a tensor when it was saved share one again. Raises FileNotFoundError when there is nothing of that
    name, ValueError for a damaged file.
    """
    store = open_files(find_weights(folder, name))
    shared: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for key in store:
        home = store.alias_of(key)
        if home not in shared:
            shared[home] = store[home]
        state[key] = shared[home]
    return state


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor to be saved, and the other names that share it."""

    name: str
    nbytes: int
    entry: Entry
    aliases: tuple[str, ...]


def checked_items(state: Mapping[str, torch.Tensor]) -> list[Item]:
    """The tensors to be written, each with all its names. Raises what `save_weights` raises for an entry that cannot be saved."""
    aliases: dict[str, list[str]] = {}
    entries: dict[str, Entry] = {}
    if isinstance(state, WeightStore):
        for name, home in state.aliases().items():
            aliases.setdefault(home, [])
            if home != name:
                aliases[home].append(name)
                continue
            entries[name] = Entry(shape=state.shape(name), dtype=state.dtype(name), read=_reader(state, name))
    else:
        first_with: dict[tuple[object, ...], str] = {}
        for name, tensor in state.items():
            identity = identity_of(name, tensor)
            home = first_with.setdefault(identity, name)
            if home != name:
                aliases[home].append(name)
                continue
            aliases[name] = []
            entries[name] = Entry.of(tensor)
    return [
        Item(name=name, nbytes=entry.nbytes, entry=entry, aliases=tuple(aliases[name]))
        for name, entry in entries.items()
    ]


def _tensors_and_others(state: Mapping[str, Any]) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """What is a tensor, and what is none. A store knows it; of another mapping each entry is read once."""
    if isinstance(state, WeightStore):
        return state, state.others
    entries = dict(state)
    others = {name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)}
    return {name: value for name, value in entries.items() if name not in others}, others


def _reader(store: WeightStore, name: str) -> Callable[[], torch.Tensor]:
    return lambda: store[name]


def identity_of(name: str, tensor: object) -> tuple[object, ...]:
    """Equal for names that hold the very same values in memory; checks the tensor on the way."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(_not_a_tensor(name, tensor))
    if tensor.device.type == "meta":
        raise RuntimeError(
            f"{name!r} is on the meta device and has no values to save; load the weights first, or collect an offloaded "
            "model with get_state_dict_offloaded_model"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name!r} is a tensor of layout {tensor.layout}; save its to_dense()")
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _not_a_tensor(name: str, value: object) -> str:
    told = f"{name!r} is a {type(value).__name__}, not a tensor, and a safetensors file holds tensors only"
    module, _, last = name.rpartition(".")
    if last == "_extra_state":
        whose = f"the module {module!r}" if module else "the model itself"
        return f"{told}: let get_extra_state of {whose} return a tensor, or save as torch file (safe_serialization=False)"
    return f"{told}: leave it out, or save as torch file (safe_serialization=False)"


def _split(items: list[Item], limit: int | None) -> list[list[Item]]:
    """Shards of at most `limit` bytes, in order; a larger tensor has one of its own."""
    shards: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if limit is not None and shards[-1] and used + item.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item.nbytes
    return shards


def _fresh_staging(staging: Path) -> Path:
    """An empty folder to write in, but for the mark that a killed save has left a mixture of shards: it holds until a commit."""
    staging.mkdir(exist_ok=True)
    for left in staging.iterdir():
        if left.name != COMMITTING:
            left.unlink()
    return staging


def _write(
    file: Path, shard: list[Item], state: Mapping[str, torch.Tensor], safe: bool, others: Mapping[str, Any]
) -> None:
    if safe:
        shared = {alias: item.name for item in shard for alias in item.aliases}
        write_safetensors(file, {item.name: item.entry for item in shard}, shared)
        return
    content: dict[str, Any] = dict(others)
    for item in shard:
        # a view would carry its whole storage into the file
        tensor = item.entry.read().detach().to("cpu")
        tensor = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        content.update(dict.fromkeys((item.name, *item.aliases), tensor))
    in_order = dict.fromkeys((*state, *others))  # a store does not list its others
    write_torch_file(file, {name: content[name] for name in in_order if name in content})


def write_torch_file(file: str | os.PathLike[str], content: Any) -> None:
    """torch.save, synced; raises what torch.save hides behind an error of its own: the OSError of a file that cannot be written, an interrupt."""
    with Path(file).open("wb") as out:
        noting: Any = _Noting(out)
        before = sys.exc_info()[1]  # the caller may be handling an error
        try:
            torch.save(content, noting)
        except RuntimeError as error:
            raise noting.error or _first_of(error, before) from None
        out.flush()
        os.fsync(out.fileno())


class _Noting:
    """A file that remembers why it could not be written, which torch.save does not pass on."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.error: BaseException | None = None

    def write(self, content: bytes) -> int:
        try:
            return self._out.write(content)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._out.flush()


def _first_of(error: BaseException, before: BaseException | None) -> BaseException:
    """The error during the handling of which `error` was raised, unless that is one of `before`."""
    while error.__context__ is not None and error.__context__ is not before:
        error = error.__context__
    return error


def _write_index(file: Path, files: list[str], shards: list[list[Item]]) -> str:
    weight_map = {}
    for shard_file, shard in zip(files, shards, strict=True):
        for item in shard:
            names = (item.name,) if file.name.endswith(SAFETENSORS + INDEX) else (item.name, *item.aliases)
            weight_map.update(dict.fromkeys(names, shard_file))
    total = sum(item.nbytes for shard in shards for item in shard)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(content, indent=2) + "\n")
        out.flush()
        os.fsync(out.fileno())
    return file.name


def _commit(folder: Path, staging: Path, files: list[str], index: str | None) -> None:
    if index is not None and any((folder / file).exists() for file in files):
        (staging / COMMITTING).touch()
        (folder / index).unlink(missing_ok=True)
    for file in [*files, *([index] if index else [])]:
        os.replace(staging / file, folder / file)
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_stale(folder: Path, name: str, written: set[str]) -> None:
    for safe, kind in ((True, SAFETENSORS), (False, TORCH)):
        stem = stem_of(name, safe)
        earlier = [folder / f"{stem}{kind}{INDEX}", folder / f"{stem}{kind}", *shards_in(folder, stem, kind)]
        for file in earlier:
            if file.name not in written:
                file.unlink(missing_ok=True)
        shutil.rmtree(folder / staging_name(stem), ignore_errors=True)
