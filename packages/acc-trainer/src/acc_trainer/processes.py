"""What can be asked of, and done with, the processes of a run: shared by the states and the Accelerator."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

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
        """Go on when every process got here."""
        self.world.comm.barrier()

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
        """This process's part of a list, a tuple, a tensor's rows, a data set, or of every value of a dict.

        The first ranks get one more where the length does not divide. `apply_padding` repeats the last item so that every part is as
        long. The input itself is never changed. Other types are handed out whole. Raises `ValueError` for a dict whose values have
        different lengths.
        """
        yield split(inputs, self.world.rank, self.world.size, apply_padding)


@contextmanager
def _goes_first(world: World, first: bool) -> Iterator[None]:
    if not first:
        world.comm.barrier()
    try:
        yield
    finally:
        if first:
            world.comm.barrier()


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to `rank` of `size`; see `Processes.split_between_processes`."""
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        _check_lengths(inputs)
        parts = {key: split(value, rank, size, apply_padding) for key, value in inputs.items()}
        return parts if type(inputs) is dict else _like(inputs, parts)
    if _is_dataset(inputs):
        return inputs.select(_places(len(inputs), rank, size, apply_padding))
    if not isinstance(inputs, (list, tuple, torch.Tensor)) or (
        isinstance(inputs, torch.Tensor) and inputs.dim() == 0
    ):
        return inputs
    places = _places(len(inputs), rank, size, apply_padding)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(places, dtype=torch.long, device=inputs.device)]
    part = [inputs[place] for place in places]
    return tuple(part) if isinstance(inputs, tuple) else part


def _places(length: int, rank: int, size: int, apply_padding: bool) -> list[int]:
    """The positions of a rank's part, the last position repeated for padding."""
    each, rest = divmod(length, size)
    start = rank * each + min(rank, rest)
    places = list(range(start, start + each + (1 if rank < rest else 0)))
    if apply_padding and length:
        longest = each + (1 if rest else 0)
        places += [length - 1] * (longest - len(places))
    return places


def _check_lengths(inputs: Mapping[Any, Any]) -> None:
    lengths = {}
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            continue  # checked when it is split itself
        try:
            lengths[key] = len(value)
        except TypeError:
            raise ValueError(
                f"every value of a dict to be split needs a length, but {key!r} holds {value!r}"
            ) from None
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all values of a dict to be split must have the same length, got {lengths}")


def _like(original: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """`parts` in a mapping of the same kind, where that can be made from a dict."""
    try:
        return type(original)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def _is_dataset(inputs: Any) -> bool:
    return type(inputs).__module__.partition(".")[0] == "datasets" and hasattr(inputs, "select")
