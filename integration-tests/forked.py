"""Forked copies of a prepared process: alone, as ranks of a gloo group, and in lanes that work through a list side by side."""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
LANES = min(4, len(os.sched_getaffinity(0))) if sys.platform.startswith("linux") else 1
LIMIT_S = 60.0
LANE_LIMIT_S = 240.0


class ChildFailed(RuntimeError):
    """A forked process raised, ended without an answer, or did not end; the message says what of it."""


class Killed(ChildFailed):
    """A forked process was killed with SIGKILL, and not because it did not end."""


class Forks:
    """`size` forks of this process in which `do()` runs; several form a gloo group, so this process must have none."""

    def __init__(self, do: Callable[[], Any], size: int = 1) -> None:
        self._meeting = tempfile.mkdtemp() if size > 1 else ""
        self._children: list[tuple[int, int]] = []  # process and pipe
        for rank in range(size):
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.close(reading)
                _work(do, writing, rank, size, self._meeting)
            os.close(writing)
            self._children.append((child, reading))

    def outcomes(self, limit_s: float = LIMIT_S) -> list[Any]:
        """What `do` returned in each, or the ChildFailed that says why there is no such thing; they have ended then, all of them."""
        until = time.monotonic() + limit_s
        found = [_outcome(child, pipe, until) for child, pipe in self._children]
        if self._meeting:
            Path(self._meeting, "store").unlink(missing_ok=True)
            os.rmdir(self._meeting)
        return found


def in_child(do: Callable[[], Any], size: int = 1) -> Any:
    """What `do()` returns in a fork of this process; of several that are ranks, what the first says. Raises the ChildFailed of any."""
    outcomes = Forks(do, size).outcomes()
    for outcome in outcomes:
        if isinstance(outcome, ChildFailed):
            raise outcome
    return outcomes[0]


def in_lanes(
    items: Sequence[T], do: Callable[[int, Sequence[T]], list[Any]], size: int = 1
) -> list[tuple[Any, ...]]:
    """`do(lane, part)` in forks for consecutive parts of `items`, all at once. It returns a list, with something for each item.

    Each lane is a group of `size` ranks; the result has for each item the tuple of what its ranks said.
    """
    bounds = [len(items) * lane // LANES for lane in range(LANES + 1)]
    parts = [items[begin:end] for begin, end in itertools.pairwise(bounds) if begin < end]
    lanes = [Forks(lambda lane=lane, part=part: do(lane, part), size) for lane, part in enumerate(parts)]
    groups = [lane.outcomes(LANE_LIMIT_S) for lane in lanes]
    for outcome in (outcome for ranks in groups for outcome in ranks):
        if isinstance(outcome, ChildFailed):
            raise outcome
    return [said for ranks in groups for said in zip(*ranks, strict=True)]


def _work(do: Callable[[], Any], pipe: int, rank: int, size: int, meeting: str) -> None:
    """The whole life of a fork. Never returns."""
    code = 1
    try:
        torch.set_num_threads(1)  # torch makes its pool anew after a fork, which two threads at once break
        if size > 1:
            _join(rank, size, meeting)
        outcome = do()
        code = 0
    except BaseException as error:  # noqa: BLE001  told to the parent
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        outcome = ChildFailed("".join(lines[-1:]).strip() + " | " + "".join(lines[-4:-1])[-600:])
    with os.fdopen(pipe, "wb") as stream:
        pickle.dump(outcome, stream)
    sys.stderr.flush()
    os._exit(code)


def _join(rank: int, size: int, meeting: str) -> None:
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=size
    )


def _outcome(child: int, pipe: int, until: float) -> Any:
    late = not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]
    if late:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(pipe, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if late:
        return ChildFailed("it did not end")
    if answer:
        return pickle.loads(answer)
    how = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended with {status}"
    return (Killed if how.endswith(f" {signal.SIGKILL:d}") else ChildFailed)(how)
