"""Tensors copied a piece at a time by a small pool, so that only what is being read of a mapped file is in memory.

[Note: pages given back]
The pages of a file that were read through a mapping count as this process's memory until they are given back (madvise,
on Linux). Only pages that lie in the piece as a whole go, and reading them again brings them back from the file. It is
for mappings that nobody has written to: a change made in place would be lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

PIECE_BYTES = 16 << 20
_MOST_WORKERS = 8


def in_pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Flat views of the tensors, which have one shape, side by side; `PIECE_BYTES` of the widest at the most.

    Tensors that do not all lie in row order come whole, as they are.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    step = PIECE_BYTES // max(tensor.element_size() for tensor in tensors)
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), step):
        yield tuple(tensor[start : start + step] for tensor in flat)


def give_back(tensor: torch.Tensor) -> None:
    """Take the pages of a tensor that is mapped from a file out of memory; see the note above. Nothing happens but on Linux."""
    give = _madvise()
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and give is not None and tensor.is_contiguous() and end > first:
        give(first, end - first, mmap.MADV_DONTNEED)


def copy_jobs(
    target: torch.Tensor, source: torch.Tensor, mapped: bool, note: Callable[[int], None]
) -> list[Callable[[], None]]:
    """Calls that together write `source` into `target`, converting it; `note` hears how many bytes of `source` were read."""

    def copy(to: torch.Tensor, piece: torch.Tensor) -> None:
        # both are off in every new thread; a device's memory is not asked for the piece that is converted
        with torch.inference_mode(to.is_inference()), torch.no_grad():
            to.copy_(piece if to.device == piece.device else piece.to(to.dtype))
        if mapped:
            give_back(piece)
        note(piece.nbytes)

    return [functools.partial(copy, to, piece) for to, piece in in_pieces(target, source)]


def run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Do the jobs, in a few threads when there are several; what one raises is raised here, and the others are not begun."""
    workers = min(len(jobs), _MOST_WORKERS, _cpus())
    if workers < 2:
        for job in jobs:
            job()
        return
    waiting = deque(jobs)

    def work() -> None:
        while (job := _next(waiting)) is not None:
            try:
                job()
            except BaseException:
                waiting.clear()
                raise

    pool = ThreadPoolExecutor(workers, thread_name_prefix="acc-bigmodel-load")
    try:
        for worker in [pool.submit(work) for _ in range(workers)]:
            worker.result()
    finally:
        waiting.clear()
        pool.shutdown()


def _next(waiting: deque[Callable[[], None]]) -> Callable[[], None] | None:
    try:
        return waiting.popleft()
    except IndexError:  # another thread took the last one
        return None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library that cannot be asked
            call: Any = ctypes.CDLL(None).madvise
            call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            return call
    return None
