"""What micro-batches under without_sync leave behind is exchanged before a step, and only then."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.regions import compile_regions, has_compiled_regions
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.held import Before
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Bundle


def prepared(*models: nn.Module) -> ReplicatedStrategy:
    strategy = ReplicatedStrategy(current_world(), Precision())
    strategy.prepare(Bundle(models=list(models)))
    return strategy


def one_weight() -> Any:
    return nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})


def counted(strategy: ReplicatedStrategy, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    exchanged: list[nn.Module] = []
    monkeypatch.setattr(strategy, "exchange_model", exchanged.append)
    return exchanged


def test_a_step_outside_and_a_step_inside_take_the_mean_of_the_ranks() -> None:
    def run() -> list[float]:
        model = one_weight()
        strategy, optimizer = prepared(model), torch.optim.SGD(model.parameters(), lr=1.0)
        weights = []
        for inside in (False, True):
            with strategy.without_sync(model):
                strategy.backward((model["w"] * -(1.0 + current_world().rank)).sum())
                if inside:
                    strategy.step(optimizer)
            if not inside:
                strategy.step(optimizer)
            optimizer.zero_grad()
            weights.append(model["w"].item())
        return weights

    assert run_threads(3, run) == [[2.0, 4.0]] * 3


def test_ranks_that_train_apart_take_their_own_and_exchange_behind_it() -> None:
    def run() -> list[float]:
        model = one_weight()
        strategy, optimizer = prepared(model), torch.optim.SGD(model.parameters(), lr=1.0)
        with strategy.without_sync(model, apart=True):
            with strategy.without_sync(model):  # a window inside
                strategy.backward((model["w"] * -(1.0 + current_world().rank)).sum())
            strategy.step(optimizer)
            apart = model["w"].item()
        strategy.step(optimizer)  # with what is still there
        return [apart, model["w"].item()]

    assert run_threads(2, run) == [[1.0, 2.5], [2.0, 3.5]]


def test_a_rank_whose_micro_batch_failed_takes_part_with_nothing() -> None:
    def run() -> float:
        model = one_weight()
        strategy, optimizer = prepared(model), torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with strategy.without_sync(model):
                if current_world().rank == 0:
                    raise RuntimeError("no batch")
                strategy.backward((model["w"] * -4.0).sum())
        except RuntimeError:
            pass
        strategy.step(optimizer)
        return model["w"].item()

    assert run_threads(2, run) == [2.0, 2.0]


def test_a_window_that_ends_as_usual_exchanges_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        model, other = one_weight(), one_weight()
        strategy, optimizer = prepared(model, other), torch.optim.SGD(model.parameters(), lr=1.0)
        exchanged = counted(strategy, monkeypatch)
        with strategy.without_sync(model), strategy.without_sync(other):
            strategy.backward((model["w"] + other["w"]).sum())
        strategy.backward(model["w"].sum())
        strategy.step(optimizer)
        assert not exchanged
        with strategy.without_sync(other):
            strategy.backward(other["w"].sum())
        strategy.step(optimizer)
        assert exchanged == [other]
        strategy.step(optimizer)
        assert exchanged == [other]

    run_threads(2, run)


def test_ranks_that_leave_out_all_micro_batches_or_differentiate_themselves_take_part() -> None:
    def run() -> list[float]:
        model = one_weight()
        strategy, optimizer = prepared(model), torch.optim.SGD(model.parameters(), lr=1.0)
        weights = []
        for by_hand in (False, True):
            for _ in range(2):
                with strategy.without_sync(model):
                    loss = (model["w"] * -4.0).sum()
                    if current_world().rank == 0:
                        continue
                    loss.backward() if by_hand else strategy.backward(loss)
            strategy.step(optimizer)
            optimizer.zero_grad()
            weights.append(model["w"].item())
        return weights

    assert run_threads(2, run) == [[4.0, 8.0]] * 2


def test_a_window_of_a_compiled_model_is_that_of_the_model() -> None:
    def run() -> list[list[float]]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(4)))
        strategy = prepared(model)
        whole, regional = torch.compile(model, backend="eager"), compile_regions(model, backend="eager")
        assert has_compiled_regions(regional)
        left = []
        for shell in (whole, regional, torch.compile(regional, backend="eager")):
            with strategy.without_sync(shell):
                loss = (model[0][0].weight * (1.0 + current_world().rank)).sum()
                strategy.backward(loss)
                left.append(model[0][0].weight.grad.item())
                with strategy.sync_next_backward(shell):
                    strategy.backward((model[0][0].weight * 0).sum())
            left.append(model[0][0].weight.grad.item())
            model[0][0].weight.grad = None
        assert strategy.window_of(nn.Linear(1, 1)) is None
        return left

    assert run_threads(2, run) == [[1.0, 1.5] * 3, [2.0, 1.5] * 3]


def test_a_window_is_exchanged_by_all_ranks_though_nobody_else_has_the_model() -> None:
    def run() -> list[bool]:
        model, other = one_weight(), one_weight()
        strategy, optimizer = prepared(model, other), torch.optim.SGD(other.parameters(), lr=1.0)
        with strategy.without_sync(model):
            strategy.backward(model["w"].sum())
        kept = model if current_world().rank else None
        gone = weakref.ref(model)
        del model
        gc.collect()
        strategy.step(optimizer)
        assert kept is None or kept["w"].grad.item() == 1.0
        strategy.close()
        gc.collect()
        return [gone() is kept]

    assert run_threads(2, run) == [[True]] * 2


def test_a_closed_strategy_may_be_left_inside_a_window() -> None:
    def run() -> None:
        model = one_weight()
        strategy = prepared(model)
        with strategy.without_sync(model, apart=True):
            strategy.close()
        strategy.exchange_held()

    run_threads(2, run)


def test_gradients_from_a_checkpoint_are_held_until_they_are_exchanged() -> None:
    def run() -> list[float]:
        model = one_weight()
        strategy, optimizer = prepared(model), torch.optim.SGD(model.parameters(), lr=1.0)
        weights = []
        for held in (True, False):
            model["w"].grad = torch.tensor([-2.0 * current_world().rank])
            strategy.note_held(model, held)
            strategy.step(optimizer)
            weights.append(model["w"].item())
            model["w"].data.zero_()
        strategy.note_held(nn.Linear(1, 1), True)  # not one that is trained
        strategy.exchange_held()
        return weights

    assert run_threads(2, run) == [[1.0, 0.0], [1.0, 2.0]]


def test_a_sparse_gradient_on_one_rank_is_an_error_on_all() -> None:
    def run() -> str:
        model = nn.Embedding(4, 2, sparse=True)
        strategy = prepared(model)
        with strategy.without_sync(model):
            rows = torch.tensor([1])
            loss = model(rows).sum() if current_world().rank else model.weight.sum()
            strategy.backward(loss)
        with pytest.raises(ValueError, match=r"shape \(4, 2\) is sparse on 1 of 2 ranks") as caught:
            strategy.exchange_held()
        return str(caught.value)

    assert len(set(run_threads(2, run))) == 1


def test_a_gradient_is_reached_when_it_is_new_gone_or_changed() -> None:
    first, second = torch.ones(2), torch.ones(2)
    before = Before([first, None])
    assert before.reached([first, None]) == [False, False]
    assert before.reached([first, second]) == [False, True]
    assert before.reached([None, None]) == [True, False]
    assert before.reached([second, None]) == [True, False]
    first.add_(1)
    assert before.reached([first, None]) == [True, False]
