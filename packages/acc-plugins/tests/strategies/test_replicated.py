"""Gradients averaged through any Comm."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.testing import run_threads
from acc_ops.world import World, current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract


class TestTwoRanks(StrategyContract):
    size = 2

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        return ReplicatedStrategy(world, precision)


class TestThreeRanks(TestTwoRanks):
    size = 3


class TestOneRank(TestTwoRanks):
    size = 1


def prepared(*models: nn.Module, **options: Any) -> ReplicatedStrategy:
    strategy = ReplicatedStrategy(current_world(), Precision(), **options)
    strategy.prepare(Bundle(models=list(models)))
    return strategy


def test_a_parameter_that_only_some_ranks_use_gets_their_average_and_unused_ones_none() -> None:
    def run() -> None:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("all", "some", "never")})
        strategy = prepared(model)
        rank = current_world().rank
        loss = (model["all"] * rank).sum()
        if rank == 1:
            loss = loss + (model["some"] * 8).sum()
        strategy.backward(loss)
        assert model["all"].grad.tolist() == [1.5, 1.5]
        assert model["some"].grad.tolist() == [2.0, 2.0]
        assert model["never"].grad is None

    run_threads(4, run)


def test_averaging_again_while_gradients_accumulate_stays_right() -> None:
    def run() -> None:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})
        strategy = prepared(model)
        for _ in range(3):
            strategy.backward((model["w"] * current_world().rank).sum())
        assert model["w"].grad.item() == pytest.approx(3 * 0.5)

    run_threads(2, run)


def test_two_models_in_one_backward_and_mixed_dtypes() -> None:
    def run() -> None:
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).double()
        strategy = prepared(first, second)
        x = torch.full((1, 1), float(current_world().rank))
        strategy.backward(first(x).sum() + second(x.double()).sum().float())
        assert (first.weight.grad.item(), second.weight.grad.item()) == (0.5, 0.5)
        assert second.weight.grad.dtype == torch.float64

    run_threads(2, run)


def test_a_model_under_without_sync_is_left_out_while_another_synchronises() -> None:
    def run() -> None:
        held, free = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        strategy = prepared(held, free)
        rank = current_world().rank
        x = torch.full((1, 1), float(rank))
        with strategy.without_sync(held):
            with strategy.without_sync(held):
                pass
            strategy.backward(held(x).sum() + free(x).sum())
        assert held.weight.grad.item() == rank
        assert free.weight.grad.item() == 0.5

    run_threads(2, run)


def test_buffers_follow_rank_0() -> None:
    def run() -> None:
        rank = current_world().rank
        model = nn.BatchNorm1d(2)
        strategy = prepared(model)
        strategy.backward(model(torch.full((3, 2), float(rank))).sum())
        assert model.running_mean.tolist() == [0, 0]
        assert model.num_batches_tracked == 1

    run_threads(2, run)


def test_buffers_stay_local_when_asked() -> None:
    def run() -> None:
        rank = current_world().rank
        model = nn.BatchNorm1d(2)
        strategy = prepared(model, broadcast_buffers=False)
        strategy.backward(model(torch.full((3, 2), float(rank))).sum())
        assert model.running_mean[0].item() == pytest.approx(0.1 * rank)

    run_threads(2, run)


def test_different_models_are_refused_on_every_rank_with_the_same_words() -> None:
    def run() -> str:
        width = 2 + current_world().rank
        with pytest.raises(ValueError, match="different models") as caught:
            prepared(nn.Linear(2, width))
        return str(caught.value)

    words = run_threads(2, run)
    assert words[0] == words[1]
    assert "'weight', (2, 2)" in words[0]
    assert "'weight', (3, 2)" in words[0]


def test_sparse_gradients_are_refused_with_a_way_out() -> None:
    def run() -> None:
        model = nn.Embedding(3, 2, sparse=True)
        strategy = prepared(model)
        with pytest.raises(ValueError, match="sparse=False"):
            strategy.backward(model(torch.tensor([1])).sum())

    run_threads(2, run)


def test_it_keeps_a_model_until_it_is_closed_so_that_all_ranks_exchange_alike() -> None:
    def run() -> None:
        model = nn.Linear(1, 1)
        strategy = prepared(model)
        gone = weakref.ref(model)
        if current_world().rank:
            del model
        gc.collect()
        weight = torch.ones(1, requires_grad=True)
        strategy.backward(weight.sum())  # all ranks average the model
        assert gone() is not None
        model = None
        strategy.close()
        gc.collect()
        assert gone() is None

    run_threads(2, run)


def test_preparing_twice_averages_once() -> None:
    def run() -> None:
        model = nn.Linear(1, 1, bias=False)
        strategy = prepared(model)
        strategy.prepare(Bundle(models=[model]))
        assert len(strategy._training) == 1

    run_threads(2, run)
