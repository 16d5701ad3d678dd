"""Every sample exactly once: gathering what the ranks computed, without the rows that only filled up a batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from acc_ops.collectives import gather
from acc_ops.tree import honor_type, leaves_with_paths, recursively_apply
from acc_ops.world import World
from acc_trainer.data.batch_rows import RowRule, is_array, is_list, is_plain
from acc_trainer.data.shares import shares_of
from acc_trainer.grad_sync import GradSync

_ALL = -1  # the rows of a batch, however many there are


def gather_for_metrics(data: Any, grad_sync: GradSync, world: World, use_gather_object: bool = False) -> Any:
    """`data` of all ranks in rank order, without the rows that repeat a sample.

    Tensors (and nested structures of them) are joined along their first dimension; a tensor is cut when that dimension is the batch's.
    Anything else, or everything with `use_gather_object`, travels as objects: a list holds one entry per sample and is joined to one list, and so
    is a tuple of plain values (texts, as torch's collate makes them). The items of other tuples and the values of a mapping are joined each for
    itself, and other values become a list with one entry per rank. What is cut is said in `data/batch_rows.py`; with `use_gather_object` a list is
    always rows, whatever is in it.

    Where layers or sequences are split, ranks have the same samples, and the first of them speaks for all: what each has of a sequence must be
    joined before.
    """
    rows = _rows(grad_sync, world)
    if use_gather_object or not _all_tensors(data):
        mine = data if rows is None else _cut_objects(data, *rows, use_gather_object)
        return _merge(world.comm.all_gather_object(mine))
    if rows is not None:
        data = recursively_apply(_cut, data, *rows)
    return gather(data, world=world)


def _rows(grad_sync: GradSync, world: World) -> tuple[int, int] | None:
    """(rows of this rank's batch, those of them that it brings in) where not every rank brings in all of its own.

    Ranks that share their samples bring them in once.
    """
    position: Any = grad_sync.loaders[-1] if grad_sync.loaders else None
    shares = shares_of(world.mesh, world.rank, world.size)
    real, sizes = getattr(position, "real", None), getattr(position, "sizes", None)
    if real is None or sizes is None or real == sizes or len(real) != shares.count:
        return None if shares.count == world.size else (_ALL, _ALL if shares.speaks else 0)
    return sizes[shares.mine], real[shares.mine] if shares.speaks else 0


def _cut(tensor: torch.Tensor, size: int, real: int) -> torch.Tensor:
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)  # one value of this rank; all ranks must send as many dimensions
    if real == 0:  # nothing of this rank's batch is a sample of its own
        return tensor[:0]
    return tensor[:real] if tensor.shape[0] == size else tensor


def _all_tensors(data: Any) -> bool:
    if isinstance(data, Mapping):
        return bool(data) and all(_all_tensors(value) for value in data.values())
    if isinstance(data, (list, tuple)):
        return bool(data) and all(_all_tensors(value) for value in data)
    if isinstance(data, torch.Tensor):
        return True
    kinds = [isinstance(leaf, torch.Tensor) for _, leaf in leaves_with_paths(data)]  # a dataclass, say
    return bool(kinds) and all(kinds)


def _cut_objects(data: Any, size: int, real: int, lists_are_rows: bool) -> Any:
    if real == _ALL:
        return data
    if isinstance(data, torch.Tensor):
        return _cut(data, size, real)
    if isinstance(data, Mapping):
        return {key: _cut_objects(value, size, real, False) for key, value in data.items()}
    if isinstance(data, tuple) and not _is_chain(data):
        return honor_type(data, (_cut_objects(value, size, real, False) for value in data))
    if real == 0:  # nothing of this rank's batch is a sample of its own
        return data[:0] if _is_chain(data) or is_array(data) else _Nothing()
    if lists_are_rows and isinstance(data, list):
        return data[:real] if len(data) == size else data
    return RowRule().cut(data, slice(0, real), size)


def _is_chain(data: Any) -> bool:
    """A list, or a tuple of plain values: joined to one list."""
    return isinstance(data, list) or (is_list(data) and is_plain(data))


class _Nothing:
    """In place of a value of a rank that has no sample in this batch."""


def _merge(parts: list[Any]) -> Any:
    """One structure out of those of all ranks."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part.reshape(-1) if part.dim() == 0 else part for part in parts])
    if isinstance(first, Mapping):
        return {key: _merge([part[key] for part in parts]) for key in first}
    if _is_chain(first):
        return list(itertools.chain.from_iterable(parts))
    if isinstance(first, tuple):
        return honor_type(first, (_merge(list(values)) for values in zip(*parts, strict=True)))
    return [part for part in parts if not isinstance(part, _Nothing)]
