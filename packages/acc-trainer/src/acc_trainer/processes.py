"""What can be asked of, and done with, the processes of a run: shared by the states and the Accelerator."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from acc_ops.collectives import DistributedOperationException, barrier
from acc_ops.tree import is_namedtuple
from acc_ops.world import World


class Processes:
    """The face of a `World` that scripts know: indices, decorators, "main process first", splitting of inputs."""

    @property
    def world(self) -> World:
        """Who this process is among the others."""
        raise NotImplementedError

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.world.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world.size > 1

    def wait_for_everyone(self) -> None:
        """Go on when every process got here. `MismatchError` on every process when one of them is in another collective instead."""
        barrier(self.world)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.world.is_local_main:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: rank 0 runs the function, the others get None. Decided when the function is called."""
        return self._only(function, lambda world: world.is_main)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: the first process of each machine runs the function, the others get None."""
        return self._only(function, lambda world: world.is_local_main)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the highest rank runs the function, the others get None."""
        return self._only(function, lambda world: world.is_last)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: rank `process_index` (default 0) runs the function, the others get None."""
        return self._only(function, lambda world: world.rank == (process_index or 0))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: process `local_process_index` (default 0) of each machine runs the function, the others get None."""
        return self._only(function, lambda world: world.local_rank == (local_process_index or 0))

    def _only(
        self, function: Callable[..., Any] | None, chosen: Callable[[World], bool]
    ) -> Callable[..., Any]:
        if function is None:
            return lambda given: self._only(given, chosen)
        if not callable(function):
            raise TypeError(f"this decorator takes a function, got {function!r}")

        @functools.wraps(function)
        def on_chosen(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if chosen(self.world) else None

        return on_chosen

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others do; an error in rank 0 does not leave them waiting."""
        with _goes_first(self.world, self.world.is_main):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine runs the block, then the others do."""
        with _goes_first(self.world, self.world.is_local_main):
            yield

    @contextmanager
    def split_between_processes(
        self, inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor, apply_padding: bool = False
    ) -> Iterator[Any]:
        """This process's part of a list, a tuple, the rows of a tensor or an array, a data set, or of every value of a dict or namedtuple.

        The first ranks get one more where the length does not divide. `apply_padding` repeats the last item so that every part is as
        long. The input itself is never changed. Other types (text, numbers, sets) are handed out whole. Raises `ValueError`, on one
        process too, for a dict or namedtuple whose values have different lengths or cannot be split.
        """
        yield split(inputs, self.world.rank, self.world.size, apply_padding)


@contextmanager
def _goes_first(world: World, first: bool) -> Iterator[None]:
    if not first:
        barrier(world)
    try:
        yield
    except (
        DistributedOperationException
    ):  # a collective met the others' barrier: they have raised, and wait no longer
        raise
    except BaseException:
        if first:
            barrier(world)
        raise
    if first:
        barrier(world)


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to `rank` of `size`; see `Processes.split_between_processes`."""
    if isinstance(inputs, Mapping) or is_namedtuple(inputs):
        values = inputs if isinstance(inputs, Mapping) else inputs._asdict()
        _check_values(values)
        parts = {key: split(value, rank, size, apply_padding) for key, value in values.items()}
        return inputs if size == 1 else _like(inputs, parts)
    if size == 1 or not _has_rows(inputs):
        return inputs
    places = _places(len(inputs), rank, size, apply_padding)
    if _is_dataset(inputs):
        return inputs.select(places)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(places, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, Sequence):
        part = [inputs[place] for place in places]
        return tuple(part) if isinstance(inputs, tuple) else part
    rows = getattr(inputs, "iloc", inputs)  # pandas means columns without it
    repeated = len(places) > len(set(places))
    return rows[places] if repeated else rows[slice(places[0], places[-1] + 1) if places else slice(0, 0)]


def _has_rows(inputs: Any) -> bool:
    """Whether it is a list, a tuple, a range, a data set, or an array: something with a length, of which a slice is a part."""
    if isinstance(inputs, (str, bytes, bytearray)) or not hasattr(inputs, "__getitem__"):
        return False
    try:
        len(inputs)
    except TypeError:  # a tensor or an array without dimensions
        return False
    return isinstance(inputs, (Sequence, torch.Tensor)) or hasattr(inputs, "__array__") or _is_dataset(inputs)


def _places(length: int, rank: int, size: int, apply_padding: bool) -> list[int]:
    """The positions of a rank's part, the last position repeated for padding."""
    each, rest = divmod(length, size)
    start = rank * each + min(rank, rest)
    places = list(range(start, start + each + (1 if rank < rest else 0)))
    if apply_padding and length:
        longest = each + (1 if rest else 0)
        places += [length - 1] * (longest - len(places))
    return places


def _check_values(values: Mapping[Any, Any]) -> None:
    """Every value can be split, and all have as many rows."""
    lengths = {}
    for key, value in values.items():
        if isinstance(value, Mapping) or is_namedtuple(value):
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


def _is_dataset(inputs: Any) -> bool:
    return type(inputs).__module__.partition(".")[0] == "datasets" and hasattr(inputs, "select")
