"""What `split_between_processes` hands to each process: a part of the rows, in the kind of thing that was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

import acc_ops


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to `rank` of `size`; see `Processes.split_between_processes`."""
    if isinstance(inputs, Mapping) or acc_ops.is_namedtuple(inputs):
        values = inputs if isinstance(inputs, Mapping) else inputs._asdict()
        _check_values(values)
        parts = {key: split(value, rank, size, apply_padding) for key, value in values.items()}
        return inputs if size == 1 else _like(inputs, parts)
    if isinstance(inputs, torch.Tensor):
        _check_dense(inputs)
    if size == 1 or not _has_rows(inputs):
        return inputs
    places = _places(len(inputs), rank, size, apply_padding)
    if _selects(inputs):
        return inputs.select(places)
    if isinstance(inputs, Dataset):
        return Subset(inputs, places)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(places, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, Sequence):
        part = [inputs[place] for place in places]
        return tuple(part) if isinstance(inputs, tuple) else part
    rows = getattr(inputs, "iloc", inputs)  # pandas means columns without it
    repeated = len(places) > len(set(places))
    return rows[places] if repeated else rows[slice(places[0], places[-1] + 1) if places else slice(0, 0)]


def _has_rows(inputs: Any) -> bool:
    """Whether it is a list, a tuple, a range, a data set, or an array: something with a length, whose rows have numbers."""
    unsplit = (str, bytes, bytearray, IterableDataset)  # the last promises a __getitem__ that it has not got
    if isinstance(inputs, unsplit) or not hasattr(inputs, "__getitem__"):
        return False
    try:
        len(inputs)
    except TypeError:  # a tensor or an array without dimensions
        return False
    kinds = (Sequence, torch.Tensor, Dataset)
    return isinstance(inputs, kinds) or hasattr(inputs, "__array__") or _selects(inputs)


def _places(length: int, rank: int, size: int, apply_padding: bool) -> list[int]:
    """The positions of a rank's part, the last position repeated for padding."""
    each, rest = divmod(length, size)
    start = rank * each + min(rank, rest)
    places = list(range(start, start + each + (1 if rank < rest else 0)))
    if apply_padding and length:
        longest = each + (1 if rest else 0)
        places += [length - 1] * (longest - len(places))
    return places


def _check_dense(tensor: torch.Tensor) -> None:
    """Raise `ValueError` for a sparse or nested tensor, of which torch gives no rows by their numbers."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        ways = "a list of its rows" + ("" if tensor.is_nested else ", or tensor.to_dense()")
        raise ValueError(f"split_between_processes takes dense tensors, got a {kind} one: give {ways}")


def _check_values(values: Mapping[Any, Any]) -> None:
    """Every value can be split, and all have as many rows."""
    lengths = {}
    for key, value in values.items():
        if isinstance(value, Mapping) or acc_ops.is_namedtuple(value):
            continue  # checked when it is split itself
        if not _has_rows(value):
            raise ValueError(
                f"every value of a dict to be split must be a list, a tuple, a tensor or an array, but {key!r} holds {value!r:.80}: put "
                "it into a list, or leave it out of the dict"
            )
        lengths[key] = len(value)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all values of a dict to be split must have the same length, got {lengths}")


def _like(original: Any, parts: dict[Any, Any]) -> Any:
    """`parts` in a mapping or namedtuple of the same kind, where that can be made from a dict."""
    if not isinstance(original, Mapping):
        return type(original)(**parts)
    if type(original) is dict:
        return parts
    try:
        return type(original)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def _selects(inputs: Any) -> bool:
    """Whether it is a data set of the `datasets` library, or of a class made from one; asked without importing that."""
    from_library = any(base.__module__.partition(".")[0] == "datasets" for base in type(inputs).__mro__)
    return from_library and hasattr(inputs, "select")
