"""Ranks that disagree all raise the same error, before anything else is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from acc_ops.testing import run_threads
from acc_ops.world import World, current_world
from acc_plugins.precisions.amp import BFloat16Autocast
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.agreement import Facts, check_agreement, model_facts, told
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Bundle


def words_of(work: Callable[[World], object], match: str, size: int = 3) -> str:
    """The one message that all ranks raised."""

    def run() -> str:
        with pytest.raises(ValueError, match=match) as caught:
            work(current_world())
        return str(caught.value)

    words = set(run_threads(size, run))
    assert len(words) == 1
    return words.pop()


def told_by(world: World, options: dict[str, str], *models: nn.Module, treated: Facts | None = None) -> None:
    check_agreement(world.comm, options, [model_facts(model, treated or []) for model in models])


def test_ranks_that_say_the_same_go_on() -> None:
    run_threads(3, lambda: told_by(current_world(), {"a": "1"}, nn.Linear(2, 2), treated=[("x", "y")]))


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (
            lambda w: told_by(w, {"the strategy": "ddp" if w.rank < 2 else "fsdp2"}),
            "the strategy is ddp on rank 0 and fsdp2 on rank 2. Give",
        ),
        (
            lambda w: told_by(w, {"a": "1"} if w.rank != 1 else {"b": "1"}),
            "a is 1 on rank 0 and not there on rank 1",
        ),
        (
            lambda w: told_by(w, {}, *([nn.Linear(1, 1)] * (1 + w.rank))),
            "prepares 1 models at once and rank 1 2",
        ),
        (
            lambda w: told_by(w, {}, nn.Linear(2, 2 + w.rank)),
            r"different models: rank 0 has \('weight', \(2, 2\).*rank 1 has \('weight', \(3, 2\)",
        ),
        (
            lambda w: told_by(w, {}, nn.Linear(2, 2, bias=w.rank != 2)),
            "rank 0 has .'bias'.*rank 2 has no 'bias'",
        ),
        (
            lambda w: told_by(w, {}, nn.Linear(2, 2).requires_grad_(w.rank == 0)),
            "'trained'.*rank 1 has .*'frozen'",
        ),
        (
            lambda w: told_by(w, {}, nn.BatchNorm1d(2, track_running_stats=w.rank == 0)),
            "running_mean.*no 'running_mean'",
        ),
        (
            lambda w: told_by(
                w, {}, nn.Linear(1, 1), treated=[("q", "colwise"), ("o", f"row{max(w.rank, 1)}")]
            ),
            r"treat Linear differently: \('o', 'row1'\) on rank 0, \('o', 'row2'\) on rank 2",
        ),
        (
            lambda w: told_by(
                w,
                {},
                nn.Linear(1, 1),
                treated=[("a", "x"), ("b", "x")] if w.rank else [("b", "x"), ("a", "x")],
            ),
            r"\('b', 'x'\) on rank 0, \('a', 'x'\) on rank 1",
        ),
    ],
)
def test_what_differs_is_named_with_its_rank_on_every_rank(
    work: Callable[[World], object], match: str
) -> None:
    words_of(work, match)


def test_a_rank_that_is_elsewhere_is_told_of() -> None:
    def run() -> None:
        world = current_world()
        if world.rank == 1:
            world.comm.all_gather_object([4])
        else:
            with pytest.raises(
                ValueError, match="prepares under ddp, rank 1 is at another place of the program"
            ):
                told_by(world, {"the strategy": "ddp"})

    run_threads(2, run)


def prepared(world: World, *models: nn.Module, precision: Precision | None = None, **more: Any) -> None:
    strategy = ReplicatedStrategy(world, precision or Precision())
    strategy.prepare(Bundle(models=list(models), **more))


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (
            lambda w: prepared(
                w, nn.Linear(1, 1), precision=BFloat16Autocast(torch.device("cpu")) if w.rank else None
            ),
            "mixed_precision is no on rank 0 and bf16 on rank 1",
        ),
        (
            lambda w: prepared(
                w,
                optimizers=[
                    (torch.optim.SGD if w.rank else torch.optim.Adam)(nn.Linear(1, 1).parameters(), lr=0.1)
                ],
            ),
            "the optimizers is Adam on rank 0 and SGD on rank 1",
        ),
        (lambda w: prepared(w, nn.Linear(1, 1).requires_grad_(w.rank == 0)), "'frozen'"),
    ],
)
def test_a_strategy_compares_before_it_changes_anything(work: Callable[[World], object], match: str) -> None:
    words_of(work, match, size=2)


def test_a_model_for_evaluation_is_one_rank_s_own_matter() -> None:
    def run() -> float:
        world = current_world()
        torch.manual_seed(world.rank)
        model = nn.Linear(2, 1 + world.rank)
        before = model.weight.detach().clone()
        if world.is_main:  # the other ranks are not asked
            prepared(world, model, evaluation=True)
        assert torch.equal(model.weight, before)
        return float(before.sum())

    first, second = run_threads(2, run)
    assert first != second


def test_settings_are_told_without_addresses() -> None:
    class Plain:
        def __init__(self, value: Any) -> None:
            self.value = value

    assert told(Plain(3)) == told(Plain(3)) != told(Plain(4))
    assert told(ColwiseParallel()) == told(ColwiseParallel())
    assert told(ColwiseParallel()) != told(RowwiseParallel())
    assert told(ColwiseParallel()) != told(ColwiseParallel(use_local_output=False))
    assert told(words_of).endswith("test_agreement.words_of")
