"""What the ranks of one axis exchange within a forward, with exact gradients.

[Note: gradients are made contiguous] torch's own `torch.distributed.nn.functional.all_gather` over gloo returns wrong gradients, without an
error, when the gradient that comes in is dense but permuted, as attention's is. Every tensor is therefore made contiguous here, on the way there
and on the way back, and pieces are cut and joined before and after, never by the collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Line:
    """The ranks along one axis of a mesh, and which one this is."""

    group: Any  # a torch process group
    rank: int
    size: int

    def join(self, piece: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, in rank order, along `dim`; the gradient of a piece is the sum of what all ranks' results give it."""
        joined: Tensor = _Join.apply(piece, dim, self)
        return joined

    def swap(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Cut along `split`, one piece for each rank; the pieces received, in rank order, along `join`. Its gradient takes the way back."""
        swapped: Tensor = _Swap.apply(tensor, split, join, self)
        return swapped

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's share of what all have: a view."""
        each = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * each, each)

    def mean(self, number: Tensor) -> Tensor:
        """The mean of a number over the ranks, without a gradient."""
        total = number.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.size


def line_of(mesh: DeviceMesh, axis: str) -> Line:
    """This process among the ranks of an axis."""
    return Line(mesh[axis].get_group(), mesh[axis].get_local_rank(), mesh[axis].size())


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.line = dim, line
        wire = piece.contiguous()
        if wire.dtype is torch.bool:  # which not every backend sends
            wire = wire.view(torch.uint8)
        out = wire.new_empty((line.size, *wire.shape))
        _gather(out, wire, line.group)
        joined = torch.cat(list(out), dim)
        return joined.view(torch.bool) if piece.dtype is torch.bool else joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        line = ctx.line
        parts = torch.stack(gradient.chunk(line.size, ctx.dim)).contiguous()
        got = torch.empty_like(parts)
        _exchange(got, parts, line.group)
        return got.sum(0), None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, line: Line) -> Tensor:
        ctx.split, ctx.join, ctx.line = split, join, line
        return _swapped(tensor, split, join, line)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _swapped(gradients[0], ctx.join, ctx.split, ctx.line), None, None, None


def _swapped(tensor: Tensor, split: int, join: int, line: Line) -> Tensor:
    sent = torch.stack(tensor.chunk(line.size, split)).contiguous()
    got = torch.empty_like(sent)
    _exchange(got, sent, line.group)
    return torch.cat(list(got), join)


def _gather(out: Tensor, piece: Tensor, group: Any) -> None:
    # torch 2.13 renamed it and warns about the old name
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out.view(-1), piece.view(-1), group=group)


def _exchange(out: Tensor, pieces: Tensor, group: Any) -> None:
    """Piece i of `pieces` goes to rank i; what rank i sends becomes piece i of `out`."""
    dist.all_to_all_single(out.view(-1), pieces.view(-1), group=group)
