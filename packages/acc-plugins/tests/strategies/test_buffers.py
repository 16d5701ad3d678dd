"""Running statistics are rank 0's on every rank."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.strategies.buffers import SharedBuffers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.replaced: torch.Tensor
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_what_a_step_changed_is_rank_0_s_and_caches_are_left_alone() -> None:
    def run() -> None:
        rank = current_world().rank
        shared, model = SharedBuffers(current_world()), Model()
        shared.watch(model)
        model.norm(torch.full((3, 2), float(rank)))
        model.replaced = torch.full((1,), float(rank + 1))
        model.cache.fill_(rank)
        shared.share(held=lambda _: rank >= 0)  # in a window: nothing is sent
        assert model.replaced.item() == rank + 1
        shared.share(held=lambda _: False)
        assert model.norm.running_mean.tolist() == [0.0, 0.0]
        assert model.norm.num_batches_tracked.item() == 1
        assert (model.replaced.item(), model.cache.item()) == (1.0, rank)
        model.eval()
        model.replaced.fill_(rank)
        shared.share(held=lambda _: False)
        assert model.replaced.item() == rank

    run_threads(2, run)


def test_models_without_saved_buffers_cost_nothing_and_none_is_kept_alive() -> None:
    def run() -> None:
        shared, plain, model = SharedBuffers(current_world()), nn.Linear(1, 1), Model()
        shared.watch(plain)
        shared.watch(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        if current_world().rank == 0:  # the other rank would be waited for
            shared.share(held=lambda _: False)

    run_threads(2, run)
