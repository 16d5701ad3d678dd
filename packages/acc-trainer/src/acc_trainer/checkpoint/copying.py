"""Copies in memory, by several threads of which none waits for another.

[Note: why not torch's threads] torch gives each of its threads an equal part of every tensor, and all wait, spinning, for the last one. Where
another process uses a core, two threads then copy at a third of the speed of one. Here a thread that is held up takes less of what is left.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

_TORCH_SPLITS = 32_768  # elements from which torch divides a copy among its threads
_LEAST_BYTES = 4 << 20  # of one piece of work
_PIECES = 8  # of what is large, for each thread

Work = Callable[[], object]
Pairs = list[tuple[Tensor, Tensor]]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy into memory of the CPU, with as many threads as torch has, and wait until it is done; devices copy at the same time."""
    large: Pairs = []
    small: Pairs = []
    others: Pairs = []
    for pair in zip(
        targets, sources, strict=True
    ):  # of a model with many tensors this loop is what a copy costs
        target, source = pair
        if not source.is_cpu:
            others.append(pair)
        elif source.numel() < _TORCH_SPLITS:
            small.append(pair)
        else:
            (large if _same_bytes(target, source) else others).append(pair)
    with torch.no_grad():
        _copy(others)
    threads = max(1, torch.get_num_threads())
    least = max(_LEAST_BYTES, sum(source.nbytes for _, source in large) // (threads * _PIECES))
    _share_out(deque([*_pieces(large, least), *_batches(small)]), threads)
    for device in {source.device for _, source in others}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def _copy(pairs: Pairs) -> None:
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def _same_bytes(target: Tensor, source: Tensor) -> bool:
    """Whether the copy is the source's memory as it is."""
    plain = not (source.is_conj() or source.is_neg())
    return plain and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()


def _pieces(pairs: Pairs, nbytes: int) -> Iterator[Work]:
    for target, source in pairs:
        to, of = target.data_ptr(), source.data_ptr()
        for at in range(0, source.nbytes, nbytes):
            size = min(nbytes, source.nbytes - at)
            yield partial(ctypes.memmove, to + at, of + at, size)  # outside of Python's lock


def _batches(pairs: Pairs) -> Iterator[Work]:
    begin = size = 0
    for end, (_, source) in enumerate(pairs, 1):
        size += source.nbytes
        if size >= _LEAST_BYTES or end == len(pairs):
            yield partial(_copy, pairs[begin:end])
            begin, size = end, 0


def _share_out(work: deque[Work], threads: int) -> None:
    """Do all of `work`; the caller does its share. An error of another thread is raised here."""
    errors: list[BaseException] = []

    def do() -> None:
        with torch.no_grad():
            while not errors:
                try:
                    one = work.popleft()
                except IndexError:
                    return
                try:
                    one()
                except BaseException as error:  # noqa: BLE001  raised by the caller
                    errors.append(error)

    helpers = [threading.Thread(target=do, name="copying") for _ in range(min(threads, len(work)) - 1)]
    begun: list[threading.Thread] = []
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:  # no thread to be had: fewer do it
                break
            begun.append(helper)
        do()
    finally:
        for helper in begun:
            helper.join()
    if errors:
        raise errors[0]
