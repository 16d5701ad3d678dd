"""Ranks as threads that exchange as the ranks of an axis do; without gradients, which integration-tests/test_parallel.py compares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acc_ops.world import current_world
from acc_plugins.parallel.exchange import Line


class ThreadLine(Line):
    """All threads of the current world along one axis."""

    def join(self, piece: Tensor, dim: int) -> Tensor:
        return torch.cat(list(current_world().comm.all_gather(piece.detach().contiguous())), dim)

    def swap(self, tensor: Tensor, split: int, join: int) -> Tensor:
        whole = current_world().comm.all_gather(tensor.detach().contiguous())
        return torch.cat([one.chunk(self.size, split)[self.rank] for one in whole], join)

    def mean(self, number: Tensor) -> Tensor:
        return current_world().comm.all_reduce(number.detach().clone()) / self.size


@pytest.fixture
def line_here():
    """A function that gives the calling rank its line."""

    def make() -> Line:
        world = current_world()
        return ThreadLine(None, world.rank, world.size)

    return make
