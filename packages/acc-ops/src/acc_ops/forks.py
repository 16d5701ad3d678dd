"""Whether this process was forked from a rank: it then has that rank's process group in its memory, and is no rank itself."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as dist


def is_forked_from_a_rank() -> bool:
    """Whether the default process group is one of the process that this one was forked from."""
    return _inherited is not None and _inherited() is dist.group.WORLD


_inherited: weakref.ref[Any] | None = None  # the default process group at the time of the fork


def _after_fork() -> None:
    global _inherited
    if dist.is_available() and dist.is_initialized():
        _inherited = weakref.ref(dist.group.WORLD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
