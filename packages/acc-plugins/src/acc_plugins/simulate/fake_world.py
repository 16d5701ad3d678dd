"""A world of any size in one process: torch's fake process group, whose collectives send nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from acc_ops.parting import forget_meshes
from acc_ops.world import World, use_world

# a process has one process group; who comes again in the same thread is told so
_ONE_AT_A_TIME = threading.RLock()


class _Echo:
    """The `Comm` of rank 0 among ranks that all say what it says: enough for checks that all ranks agree."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.control_device = torch.device("cpu")

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_object(self, value: Any, root: int = 0) -> Any:  # noqa: ARG002  the signature of a Comm
        return value

    def barrier(self) -> None:
        """Everybody is here."""


@contextmanager
def fake_world(size: int) -> Iterator[World]:
    """Inside, this thread is rank 0 of `size`, and torch.distributed has a group of that size; nothing of it is left afterwards.

    Threads wait for each other. Raises RuntimeError in a process that has a process group: it can have only one.
    """
    with _ONE_AT_A_TIME, _group_of(size) as world:
        yield world


@contextmanager
def _group_of(size: int) -> Iterator[World]:
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "simulate makes a process group of its own, and this process has one already: call it before the Accelerator is made, "
            "after end_training(), or in a program of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    comm: Any = _Echo(size)
    try:
        with use_world(World(rank=0, size=size, device=torch.device("cpu"), comm=comm)) as world:
            yield world
    finally:
        forget_meshes()
        dist.destroy_process_group()
