"""Context parallelism: tensors cut along the sequence inside a block, and the models' attention opened to the whole of it."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from acc_plugins.parallel.exchange import Line, line_of
from acc_plugins.parallel.masks import SequenceError
from acc_plugins.parallel.reach import AverageLosses, Reach


def context_parallel(
    mesh: DeviceMesh,
    reaches: Sequence[Reach],
    buffers: Sequence[Tensor] = (),
    dims: Sequence[int] = (),
    keep_split: Iterable[Tensor] = (),
    *,
    rotate: str = "allgather",
) -> AbstractContextManager[None]:
    """Sequences split over the `cp` axis of `mesh`, see `split_sequences`.

    Every rank along the axis calls it with buffers of the same shapes. `rotate="alltoall"` lets torch's own engine pass keys and values round, on
    an accelerator: less memory, and no attention masks. Raises ValueError for it on a CPU, where torch has none, and, on every rank and before
    anything is cut, SequenceError for shapes that differ.
    """
    if rotate != "allgather" and mesh.device_type == "cpu":
        raise ValueError(
            f"cp_comm_strategy={rotate!r} is done by torch's own context parallelism, which does not run on the CPU: use 'allgather'"
        )
    line = line_of(mesh, "cp")
    _compare_shapes(line, torch.device(mesh.device_type), buffers, dims, keep_split)
    if rotate == "allgather":
        return split_sequences(reaches, line, buffers, dims, keep_split)
    return _passed_round(mesh["cp"], line, buffers, dims, keep_split)


@contextmanager
def _passed_round(
    mesh: DeviceMesh, line: Line, buffers: Sequence[Tensor], dims: Sequence[int], keep_split: Iterable[Tensor]
) -> Iterator[None]:
    """torch's ring attention, which is experimental: with causal attention it puts places in another order, so that all ranks have as much to do."""
    experimental = importlib.import_module("torch.distributed.tensor.experimental")
    attention = importlib.import_module("torch.distributed.tensor.experimental._attention")
    _checked(buffers, dims, keep_split, line)
    attention.set_rotate_method("alltoall")
    with (
        experimental.context_parallel(
            mesh, buffers=list(buffers), buffer_seq_dims=list(dims), no_restore_buffers=set(keep_split)
        ),
        AverageLosses(line),
    ):
        yield


@contextmanager
def split_sequences(
    reaches: Sequence[Reach],
    line: Line,
    buffers: Sequence[Tensor] = (),
    dims: Sequence[int] = (),
    keep_split: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Inside, every buffer holds this rank's part along its dimension, in place, and the models of `reaches` attend to the whole sequence.
    The mean of a loss there (`cross_entropy`, `nll_loss`) is such that the mean over the ranks is that over all targets.

    Afterwards buffers are whole again, but for those in `keep_split`. Raises SequenceError, before anything is cut, for a length that the ranks do
    not divide.
    """
    cut = _checked(buffers, dims, keep_split, line)
    wholes = [buffer.data for buffer, _ in cut]
    kept = {id(one) for one in keep_split}
    lengths = {buffer.shape[dim] // line.size for buffer, dim in cut}
    for buffer, dim in cut:
        buffer.data = line.mine(buffer.data, dim).clone()
    opened = [reach for reach in reaches if not reach.open]
    for reach in reaches:
        reach.attention.lengths = lengths
    for reach in opened:
        reach.open = True
    try:
        with AverageLosses(line):
            yield
    finally:
        for reach in opened:
            reach.open = False
        for (buffer, _), whole in zip(cut, wholes, strict=True):
            if id(buffer) not in kept:
                buffer.data = whole


def _compare_shapes(
    line: Line,
    device: torch.device,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    keep_split: Iterable[Tensor],
) -> None:
    """Raise on every rank where one cannot cut its buffers, and where the ranks have others: attention would wait, or mix other places."""
    problem: Exception | None = None
    shapes: list[tuple[int, tuple[int, ...]]] = []
    try:
        shapes = [
            (int(dim), tuple(buffer.shape)) for buffer, dim in _checked(buffers, dims, keep_split, line)
        ]
    except (TypeError, ValueError) as error:  # the others must hear of it
        problem = error
    told = zlib.crc32(repr(shapes).encode())
    both = torch.tensor(
        [problem is not None, told, -told], device=device
    )  # one exchange, small, in each step
    dist.all_reduce(both, dist.ReduceOp.MAX, group=line.group)
    failed, most, least = both.tolist()
    if problem is not None:
        raise problem
    if failed:
        raise SequenceError("another rank cannot cut its buffers along the sequence: its error tells why")
    if most != -least:
        everyone: list[Any] = [None] * line.size
        dist.all_gather_object(everyone, shapes, group=line.group)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise SequenceError(
            f"ranks that share a sequence need buffers of the same shapes, and those along cp have (dimension, shape) {everyone[0]} on the first and "
            f"{everyone[other]} on rank {other} of the axis: give all of them the same batch, filled up to the same length"
        )


def _checked(
    buffers: Sequence[Tensor], dims: Sequence[int], keep_split: Iterable[Tensor], line: Line
) -> list[tuple[Tensor, int]]:
    """The buffers, each once, with the dimension to cut."""
    for name, given in (("buffers", buffers), ("buffer_seq_dims", dims)):
        if isinstance(given, (Tensor, str, int)):
            raise TypeError(f"{name} must be a list, got {type(given).__name__}: put it into one")
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims must name one dimension for each of the {len(buffers)} buffers, got {len(dims)}: {list(dims)}"
        )
    known = {id(buffer) for buffer in buffers}
    if any(id(one) not in known for one in keep_split):
        raise ValueError(
            "no_restore_buffers holds a tensor that is not among the buffers: give it there, too"
        )
    found: dict[int, tuple[Tensor, int]] = {}
    for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffers[{place}] must be a tensor, got {type(buffer).__name__}: {buffer!r:.60}")
        if buffer.requires_grad:
            raise ValueError(
                f"buffers[{place}] of shape {tuple(buffer.shape)} requires a gradient, which would be lost when it is cut: give what it is made from"
            )
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"buffer_seq_dims[{place}]={dim} is no dimension of a buffer of shape {tuple(buffer.shape)}"
            )
        if buffer.shape[dim] % line.size:
            raise SequenceError(
                f"buffers[{place}] has {buffer.shape[dim]} places along dimension {dim} (shape {tuple(buffer.shape)}), which {line.size} ranks do not "
                f"divide: fill sequences up to a multiple of {line.size} (pad_to_multiple_of in the collate function), with labels of -100"
            )
        found[id(buffer)] = (buffer, dim)
    return list(found.values())
