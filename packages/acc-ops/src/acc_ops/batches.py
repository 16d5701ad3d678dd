"""Batches: how large they are, and to cut, pad and join them, in whatever nested data they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acc_ops.arguments import whole_number
from acc_ops.containers import container_of
from acc_ops.tree import first_tensor, recursively_apply


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor that has one, whatever comes before it.

    Raises TypeError when `data` is a leaf but no tensor, and ValueError when no tensor in it has a dimension.
    """
    found = first_tensor(data, 1)
    if found is not None:
        return int(found.shape[0])
    if isinstance(data, Tensor) or container_of(data) is not None:
        raise ValueError("no batch size: the data has no tensor with at least one dimension")
    raise TypeError(f"no batch size: expected tensors or containers of tensors, got {type(data).__name__}")


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where that finds none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - for slice functions of users, which get all four
    num_processes: int | None = None,  # noqa: ARG001
) -> Any:
    """`tensor[tensor_slice]` for every tensor; one without dimensions belongs to the whole batch and stays."""
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """One batch out of several of the same structure.

    Tensors are joined along `dim` (those without dimensions are stacked), lists and tuples without tensors are chained, and
    other leaves must be equal and stay. Raises TypeError where they are not, naming the place.
    """
    if not isinstance(data, (list, tuple)) or not data:
        raise TypeError(f"concatenate takes a non-empty list of batches, got {data!r:.100}")
    try:
        return _concatenate(data, dim)
    except _Unequal as error:
        raise TypeError(f"batch{''.join(error.path)} cannot be concatenated: {error}") from None


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors of size `batch_size` in dimension `dim`, zero-padded there to the next multiple of `num_processes`."""
    batch_size = whole_number(batch_size, "batch_size")
    num_processes = whole_number(num_processes, "num_processes")
    dim = whole_number(dim, "dim")
    if batch_size < 1 or num_processes < 1:
        raise ValueError(
            f"batch_size and num_processes must be at least 1, got {batch_size} and {num_processes}"
        )
    missing = -batch_size % num_processes

    def pad(leaf: Tensor) -> Tensor:
        if not missing or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


class _Unequal(Exception):
    """Batches that do not match, and where: the names from the outside in."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


def _concatenate(batches: Sequence[Any], dim: int) -> Any:
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        for batch in batches:
            if not isinstance(batch, Tensor):
                raise _Unequal(f"its types are {_kind_names(batches)}")
        return _joined(batches, dim)
    if any(type(batch) is not type(first) for batch in batches):
        raise _Unequal(f"its types are {_kind_names(batches)}")
    container = container_of(first)
    if container is None:
        if all(_equal(first, batch) for batch in batches[1:]):
            return first
        raise _Unequal(
            f"it is no tensor and differs ({batches[0]!r:.50}, {batches[1]!r:.50}, ...); "
            "put it into a list of one item per sample"
        )
    if _is_chain(first) and all(first_tensor(batch, 0) is None for batch in batches):
        return container.rebuild(first, [item for batch in batches for item in batch])
    if isinstance(first, Mapping):
        keys = {frozenset(batch) for batch in batches}
        rows = [[batch[key] for key in first if key in batch] for batch in batches]
    else:
        keys = {container.key(batch) for batch in batches}
        rows = [container.values(batch) for batch in batches]
    if len(keys) > 1:
        raise _Unequal(f"its keys or lengths differ ({keys})")
    joined: list[Any] = []
    try:
        for column in zip(*rows, strict=True):
            joined.append(_concatenate(column, dim))
    except _Unequal as error:
        error.path.insert(0, container.names(first)[len(joined)])
        raise
    return container.rebuild(first, joined)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    ndims = {tensor.ndim for tensor in tensors}
    if ndims == {0}:
        return torch.stack(list(tensors))
    rows = [tensor if tensor.ndim else tensor.unsqueeze(0) for tensor in tensors]
    try:
        if len(ndims) == 1 or ndims == {0, 1}:  # torch.cat itself lets empty ones of one dimension pass
            return torch.cat(rows, dim)
    except (RuntimeError, IndexError):
        fit = {_without_dim(row.shape, dim) for row in rows}
        if len(fit) == 1 and None not in fit:
            raise
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    raise _Unequal(f"shapes have to agree but in dimension {dim}, which all must have; they are {shapes}")


def _without_dim(shape: torch.Size, dim: int) -> tuple[int, ...] | None:
    """The sizes of all dimensions but `dim`; None when there is no such dimension."""
    if not -len(shape) <= dim < len(shape):
        return None
    dim %= len(shape)
    return (*shape[:dim], *shape[dim + 1 :])


def _is_chain(data: Any) -> bool:
    """A list, or a tuple whose places have no meaning of their own."""
    if isinstance(data, tuple):
        record = hasattr(data, "_fields") or hasattr(data, "n_sequence_fields")  # namedtuple, struct sequence
        return not record and not isinstance(data, torch.Size)
    return isinstance(data, list)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # an array has no single truth value
        return False


def _kind_names(batches: Iterable[Any]) -> str:
    return ", ".join(sorted({type(batch).__name__ for batch in batches}))
