"""How a process parts from the others: it tells them, and lets go of its process group when nothing of it is in use any more."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

_GLOO_PAUSE_S = 0.02  # see destroy_group


def destroy_group() -> None:
    """Destroy the default process group, when gloo's threads have let go of the last tensors.

    [Note: gloo's last tensor] A thread of gloo drops the tensors of a collective a moment after the collective has returned, and
    needs the interpreter lock for it. torch 2.6 joins that thread while it holds the lock, and waits for ever (seen about every
    hundredth time; never with 2.13, and not tried in between). And a thread that asks for the lock while Python is ending is ended
    in a way that aborts the process ("terminate called without an active exception", seen in 5 of 53 runs under load with 2.13). A
    pause without the lock, here and at exit, lets it finish.
    """
    tell_others("destroyed its process group")
    let_gloo_finish()
    forget_meshes()
    dist.destroy_process_group()


def forget_meshes() -> None:
    """Let go of the meshes that torch remembers for this thread's operations on DTensors.

    The last owner of a gloo group waits for its threads. If that were torch's memory, it would be so in a child that another thread forks, where
    those threads are missing: a segmentation fault (torch 2.13).
    """
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()


def tell_others(what: str) -> None:
    """Those that wait for this rank hear what it did, and where."""
    from acc_ops.vigil import place_of  # noqa: PLC0415 - a process without a group need not wait for it
    from acc_ops.watch import leave_all  # noqa: PLC0415

    leave_all(f"{what} at {place_of(sys._getframe(1))}")


def let_gloo_finish() -> None:
    """A pause in which gloo's threads get the interpreter lock; see `destroy_group`."""
    time.sleep(_GLOO_PAUSE_S)
