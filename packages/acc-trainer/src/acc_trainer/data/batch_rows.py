"""What the rows of a batch are: one rule for counting, cutting and joining them, of loaders and of metrics.

[Note: rows and columns] Of a batch of n rows, a tensor or an array has rows when its first dimension is n, and a list when it has n entries, one
for each row. A list can also hold columns, which have the rows themselves: torch's collate makes `[sources, targets]` out of pairs. In what that made a list
that holds containers or tensors is columns. Elsewhere a list with n entries is rows, unless it holds tensors that all have n rows, or is the batch
itself and holds tensors; a tuple is columns where it holds lists, tuples or tensors, as `(predictions, references)`. All else belongs to
the whole batch: it is handed out whole, and must be the same in batches that are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from acc_ops.batches import concatenate
from acc_ops.containers import Container, container_of
from acc_ops.optional import require
from acc_ops.tree import first_tensor, is_namedtuple, leaves_with_paths


def is_array(data: Any) -> bool:
    """Whether it is a tensor, or anything else, with a first dimension."""
    if isinstance(data, torch.Tensor):
        return data.ndim > 0
    return (
        container_of(data) is None
        and isinstance(shape := getattr(data, "shape", None), tuple)
        and bool(shape)
    )


def is_list(data: Any) -> bool:
    """A list, or a tuple whose places have no names."""
    record = is_namedtuple(data) or hasattr(data, "n_sequence_fields") or isinstance(data, torch.Size)
    return isinstance(data, (list, tuple)) and not record


def is_plain(data: Sequence[Any]) -> bool:
    """Whether it has neither tensors nor arrays nor containers inside."""
    return not any(isinstance(one, torch.Tensor) or is_array(one) or container_of(one) for one in data)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """How the rows of batches are found; `collated` when torch's own collate made them."""

    collated: bool = False

    @classmethod
    def of(cls, loader: Any) -> RowRule:
        """That of the batches of `loader`."""
        collate = getattr(loader, "collate_fn", None)
        return cls(
            collated=getattr(collate, "collate", collate) is default_collate
        )  # the one inside a CollateWithTail

    def count(self, batch: Any) -> int:
        """Rows of a batch: those of its first tensor, else of its first array, else of its first list of rows. Raises `ValueError` without any."""
        found: Any = first_tensor(batch, 1)
        if found is None:
            found = next((leaf for _, leaf in leaves_with_paths(batch) if is_array(leaf)), None)
        count = self._count_in_lists(batch) if found is None else int(found.shape[0])
        if count is None:
            raise ValueError(
                f"batches with rows to share out are needed, got {type(batch).__name__} without a tensor, an array or a list: "
                "let collate_fn make one of them, or use dispatch_batches=False"
            )
        return count

    def cut(self, batch: Any, rows: slice, total: int) -> Any:
        """`rows` of everything that has the `total` rows of the batch; what belongs to the whole batch stays."""
        return self._cut(batch, rows, total, outermost=True)

    def join(self, batches: Sequence[Any], totals: Sequence[int]) -> Any:
        """One batch of several with `totals` rows: rows behind each other. Raises `TypeError` where they do not fit, naming the place."""
        return self._join(batches, totals, "")

    def _cut(self, data: Any, rows: slice, total: int, outermost: bool = False) -> Any:
        container = container_of(data)
        if self._are_rows([data], [total], outermost):
            return data[rows] if container is None else container.rebuild(data, list(data[rows]))
        if container is None or _is_whole(data, total):
            return data
        return container.rebuild(data, [self._cut(value, rows, total) for value in container.values(data)])

    def _join(self, batches: Sequence[Any], totals: Sequence[int], path: str) -> Any:
        first, container = batches[0], container_of(batches[0])
        if len(batches) == 1:
            return first
        if any(type(batch) is not type(first) for batch in batches):
            kinds = sorted({type(batch).__name__ for batch in batches})
            raise TypeError(f"batch{path} cannot be joined: its types are {', '.join(kinds)}")
        if self._are_rows(batches, totals, outermost=not path):
            if container is None:
                return _joined_arrays(batches, path)
            return container.rebuild(first, [row for batch in batches for row in batch])
        if container is not None and not any(map(_is_whole, batches, totals)):
            return self._joined_container(container, batches, totals, path)
        if all(_equal(first, batch) for batch in batches[1:]):
            return first
        raise TypeError(
            f"batch{path} cannot be joined: it has not the rows of its batch ({list(totals)}) and differs "
            f"({batches[0]!r:.50}, {batches[1]!r:.50}, ...); put it into a list of one entry for each row"
        )

    def _joined_container(
        self, container: Container, batches: Sequence[Any], totals: Sequence[int], path: str
    ) -> Any:
        first = batches[0]
        contents = [dict(zip(container.names(one), container.values(one), strict=True)) for one in batches]
        if any(content.keys() != contents[0].keys() for content in contents):
            keys = ", ".join(str(list(content)) for content in contents)
            raise TypeError(f"batch{path} cannot be joined: its keys or lengths differ ({keys})")
        joined = [self._join([one[name] for one in contents], totals, path + name) for name in contents[0]]
        return container.rebuild(first, joined)

    def _count_in_lists(self, data: Any) -> int | None:
        container = container_of(data)
        if container is None:
            return None
        if is_list(data) and not self._holds_columns(data):
            return len(data)
        counts = [
            count for value in container.values(data) if (count := self._count_in_lists(value)) is not None
        ]
        return next(filter(None, counts), 0) if counts else None

    def _are_rows(self, parts: Sequence[Any], totals: Sequence[int], outermost: bool) -> bool:
        """Whether each of `parts` has the rows of its batch, which is the part itself where it is the outermost."""
        if all(map(is_array, parts)):
            return all(part.shape[0] == total for part, total in zip(parts, totals, strict=True))
        if not all(is_list(part) and len(part) == total for part, total in zip(parts, totals, strict=True)):
            return False
        if any(map(self._holds_columns, parts)) or (outermost and any(map(_holds_tensors, parts))):
            return False
        return not all(map(_has_columns_of_tensors, parts, totals))

    def _holds_columns(self, data: Sequence[Any]) -> bool:
        """Whether a list or tuple is known to hold columns, however many."""
        if self.collated:
            return not is_plain(data)
        return isinstance(data, tuple) and (_holds_tensors(data) or any(map(is_list, data)))


def _holds_tensors(data: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in data)


def _has_columns_of_tensors(data: Sequence[Any], total: int) -> bool:
    """Whether there are tensors or arrays in the list, and all have `total` rows; or tensors side by side with other values."""
    if _holds_tensors(data) and not all(isinstance(one, torch.Tensor) for one in data):
        return True
    arrays = [leaf for _, leaf in leaves_with_paths(data) if is_array(leaf)]
    return bool(arrays) and all(leaf.shape[0] == total for leaf in arrays)


def _is_whole(data: Any, total: int) -> bool:
    """Whether it is a list of lists that are no columns: not all of them have `total` entries, so where one has, that means nothing."""
    return (
        isinstance(data, list)
        and bool(data)
        and all(is_list(one) for one in data)
        and any(len(one) != total for one in data)
    )


def _joined_arrays(arrays: Sequence[Any], path: str) -> Any:
    try:
        if isinstance(arrays[0], torch.Tensor):
            return concatenate(arrays)
        if type(arrays[0]).__module__ == "numpy":
            return require("numpy", "joining arrays").concatenate(arrays)
    except (TypeError, ValueError) as error:
        shapes = ", ".join(str(tuple(one.shape)) for one in arrays)
        raise TypeError(
            f"batch{path} cannot be joined: {str(error).removeprefix('batch cannot be concatenated: ')}; shapes: {shapes}"
        ) from None
    raise TypeError(
        f"batch{path} cannot be joined: a {type(arrays[0]).__name__} is neither a tensor nor an array of NumPy"
    )


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, torch.Tensor):
            return torch.equal(one, other)
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # an array has no single truth value
        return False
