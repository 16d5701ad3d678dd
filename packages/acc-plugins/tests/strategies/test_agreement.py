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


def _tied(tie: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if tie:
        model[1].weight = model[0].weight
    return model


def _optimizer(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **more)


def _two_groups(model: Any, rank: int, **more: Any) -> torch.optim.Optimizer:
    first, second = list(model[0].parameters()), list(model[1].parameters())
    groups = [{"params": first}, {"params": second, **more}]
    return torch.optim.SGD(groups if rank == 0 or more else [{"params": first + second}], lr=0.1)


@pytest.mark.parametrize(
    ("built", "match"),
    [
        (
            lambda m, r: [_optimizer(m, lr=0.1 * (1 + r))],
            "lr in group 0 of AdamW is 0.1 on rank 0 and 0.2 on",
        ),
        (
            lambda m, r: [_optimizer(m, betas=(0.9, 0.9 + r / 100))],
            r"betas .* is \(0.9, 0.9\) .* \(0.9, 0.91\) on",
        ),
        (
            lambda m, r: [_optimizer(m, amsgrad=bool(r))],
            "amsgrad in group 0 of AdamW is False on rank 0 and True",
        ),
        (
            lambda m, r: [_optimizer(m, lr=torch.tensor(1.0 + r))],
            "lr in group 0 of AdamW is 1 on rank 0 and 2 on rank 1",
        ),
        (
            lambda m, r: [torch.optim.AdamW(list(m.parameters())[: 4 - r])],
            "parameter 3 in group 0 of AdamW is 1.bias on rank 0 and not there on rank 1",
        ),
        (
            lambda m, r: [torch.optim.AdamW(list(m.parameters())[:: -1 if r else 1])],
            "parameter 0 in group 0 of AdamW is 0.weight on rank 0 and 1.bias on rank 1",
        ),
        (
            lambda m, r: [_two_groups(m, r)],
            "number of parameter groups of SGD is 2 on rank 0 and 1 on rank 1",
        ),
        (
            lambda m, r: [_optimizer(m), _two_groups(m, r, weight_decay=r)],
            "weight_decay in group 1 of optimizer 1 .SGD. is 0 on rank 0 and 1 on rank 1",
        ),
    ],
)
def test_optimizers_that_differ_are_an_error_on_every_rank(built: Any, match: str) -> None:
    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        prepared(world, model, optimizers=built(model, world.rank))

    words_of(work, match, size=2)


def test_an_optimizer_that_comes_after_its_model_is_compared_too() -> None:
    def run() -> None:
        world = current_world()
        model, strategy = nn.Linear(2, 2), ReplicatedStrategy(world, Precision())
        strategy.prepare(Bundle(models=[model]))
        strategy.prepare(Bundle(optimizers=[_optimizer(model)]))
        with pytest.raises(ValueError, match="parameter 0 in group 0 of SGD is weight on rank 0 and bias on"):
            parameters = [model.bias if world.rank else model.weight]
            strategy.prepare(Bundle(optimizers=[torch.optim.SGD(parameters)]))

    run_threads(2, run)


def test_what_only_looks_different_in_an_optimizer_is_none_of_it() -> None:
    def run() -> None:
        world = current_world()
        model = nn.Linear(2, 2)
        optimizer = _optimizer(model, lr=1 if world.rank else 1.0)
        (group,) = optimizer.param_groups
        group["hook"] = lambda: world.rank  # no plain value
        if world.rank:
            group["lr"] = group.pop("lr")  # stands last now
        prepared(world, model, optimizers=[optimizer])

    run_threads(2, run)


def test_facts_that_are_equal_and_look_different_are_no_difference() -> None:
    def run() -> None:
        world = current_world()
        one = 1 if world.rank else True  # another text
        told_by(world, {}, nn.Linear(1, 1), treated=[("blocks", one)])

    run_threads(2, run)


def test_weights_that_are_shared_on_one_rank_only_are_an_error() -> None:
    words_of(lambda w: prepared(w, _tied(w.rank == 1)), r"\('1.weight'.*, 'shared with 0.weight'\)", size=2)
    run_threads(2, lambda: prepared(current_world(), _tied(True)))


def test_an_empty_model_is_tied_as_it_says_before_it_is_compared() -> None:
    class Retied(nn.Sequential):
        def tie_weights(self) -> None:
            self[1].weight = self[0].weight

    def run() -> None:
        world = current_world()
        with torch.device("meta" if world.rank else "cpu"):
            model = Retied(nn.Linear(2, 2), nn.Linear(2, 2))
        if world.is_main:
            model.tie_weights()
        strategy = ReplicatedStrategy(world, Precision())
        strategy._agree(Bundle(models=[model]))

    run_threads(2, run)


def test_what_a_user_s_function_raises_on_one_rank_is_raised_on_all() -> None:
    class Asks(ReplicatedStrategy):
        def treatment(self, model: nn.Module) -> Facts:
            if self.world.rank == 1:
                raise KeyError("no such block")
            return []

    def run() -> str:
        world = current_world()
        with pytest.raises(KeyError, match="no such block") as caught:
            Asks(world, Precision()).prepare(Bundle(models=[nn.Linear(1, 1)]))
        return str(caught.value.__cause__)

    assert run_threads(2, run) == ["rank 1 raised this", "'no such block'"]


@pytest.mark.parametrize("odd", [0, 1])
def test_what_tying_an_empty_model_raises_on_one_rank_is_raised_on_all(odd: int) -> None:
    class Retied(nn.Sequential):
        def tie_weights(self) -> None:
            raise RuntimeError("cannot tie")

    def run() -> str:
        world = current_world()
        with torch.device("meta" if world.rank == odd else "cpu"):
            model = Retied(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(RuntimeError, match="cannot tie") as caught:
            prepared(world, model, optimizers=[optimizer])
        return str(caught.value.__cause__)

    assert run_threads(2, run, timeout_s=10)[1 - odd] == f"rank {odd} raised this"


def test_an_optimizer_that_cannot_be_read_on_one_rank_is_an_error_on_all() -> None:
    class Odd(torch.Tensor):
        def tolist(self) -> Any:
            raise RuntimeError("no numbers")

    def run() -> None:
        world = current_world()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        if world.rank:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1).as_subclass(Odd)
        with pytest.raises(RuntimeError, match="no numbers"):
            prepared(world, model, optimizers=[optimizer])

    run_threads(2, run, timeout_s=10)


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
