"""What can be asked of, and done with, the processes of a run: shared by the states and the Accelerator."""

from __future__ import annotations

import builtins
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import acc_ops  # lazy, so that importing the Accelerator costs little
from acc_ops.lazy import LazyModule

if TYPE_CHECKING:
    from acc_ops import object_collectives as objects
    from acc_ops.world import World
    from acc_trainer import splitting
else:
    objects = LazyModule("acc_ops.object_collectives")
    splitting = LazyModule("acc_trainer.splitting")

logger = logging.getLogger(__name__)


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
        acc_ops.barrier(self.world)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.world.is_local_main:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: rank 0 runs the function, the others get None. Decided when the function is called."""
        return _only(self, function, lambda world: world.is_main)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: the first process of each machine runs the function, the others get None."""
        return _only(self, function, lambda world: world.is_local_main)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the highest rank runs the function, the others get None."""
        return _only(self, function, lambda world: world.is_last)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: rank `process_index` (default 0) runs the function, the others get None."""
        wanted = _place(process_index, "process_index")
        return _only(self, function, lambda world: world.rank == wanted)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: process `local_process_index` (default 0) of each machine runs the function, the others get None."""
        wanted = _place(local_process_index, "local_process_index")
        return _only(self, function, lambda world: world.local_rank == wanted)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others do. When rank 0 fails in it, the others raise `CommError` with its error instead."""
        with _goes_first(self.world, self.world.is_main, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine runs the block, then the others do; when one of the first fails, all others raise `CommError`."""
        with _goes_first(self.world, self.world.is_local_main, "local_main_process_first"):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, a tuple, the rows of a tensor or an array, a data set, or of every value of a dict or namedtuple.

        The first ranks get one more where the length does not divide. `apply_padding` repeats the last item so that every part is as
        long. The input itself is never changed. Other types (text, numbers, sets) are handed out whole. Raises `ValueError`, on one
        process too, for a dict or namedtuple whose values have different lengths or cannot be split, and for a tensor that is not dense.
        """
        yield splitting.split(inputs, self.world.rank, self.world.size, apply_padding)


def _place(index: int | None, name: str) -> int:
    if index is None:
        return 0
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ValueError(f"{name} must be a process's number, from 0, got {index!r}")
    return index


def _only(
    owner: Processes, function: Callable[..., Any] | None, chosen: Callable[[World], bool]
) -> Callable[..., Any]:
    """`function` for the chosen ranks; where there is only one process, it does what any of them would do."""
    if not isinstance(owner, Processes):
        raise ValueError(
            f"this decorator belongs to an object, got {owner!r}: make one first, accelerator = Accelerator(), "
            "and write @accelerator.on_main_process"
        )
    if not getattr(owner, "initialized", True):
        raise ValueError(f"this {type(owner).__name__} was reset: build an Accelerator() or a new one first")
    if function is None:
        return lambda given: _only(owner, given, chosen)
    if not callable(function):
        raise TypeError(f"this decorator takes a function, got {function!r}")

    @functools.wraps(function)
    def on_chosen(*args: Any, **kwargs: Any) -> Any:
        world = owner.world
        return function(*args, **kwargs) if world.size == 1 or chosen(world) else None

    return on_chosen


@contextmanager
def _goes_first(world: World, first: bool, name: str) -> Iterator[None]:
    """The others wait until the first are done, and hear how that ended."""
    if not first:
        _meet(world, name)
    begun = time.monotonic_ns()
    try:
        yield
    except acc_ops.DistributedOperationException:
        raise  # a collective in the block met the others' waiting: they have raised it, too
    except BaseException as error:
        if first and getattr(error, _TOLD, 0) < begun:  # else a block inside this one has told it
            _tell(world, name, error)
        raise
    if first:
        _meet(world, name)


_TOLD = "_every_process_knew_at"  # when an error was told to all, or heard from another: an attribute of it


def _meet(world: World, name: str, failed: str | None = None) -> None:
    if world.size == 1:
        return
    # one name for both kinds, so that blocks may be nested: each rank meets the others once a block
    for rank, text in enumerate(objects.all_objects(world, "main_process_first", failed)):
        if text is not None and failed is None:
            heard = acc_ops.CommError(f"rank {rank}, which goes first in {name}, failed: {text}")
            setattr(heard, _TOLD, time.monotonic_ns())
            raise heard


def _tell(world: World, name: str, error: BaseException) -> None:
    try:
        _meet(world, name, f"{type(error).__name__}: {error}")
    except (acc_ops.CommError, acc_ops.DistributedOperationException) as lost:
        logger.warning("rank %d failed in %s and could not tell the others: %s", world.rank, name, lost)
    setattr(error, _TOLD, time.monotonic_ns())
