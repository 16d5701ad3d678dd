"""DistributedDataParallel on real gloo processes: the strategy contract, and what only processes can show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from acc_ops.testing import RankFailed, run_processes
from acc_ops.world import World, current_world
from acc_plugins.options.kwargs import DistributedDataParallelKwargs
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.registry import choose_precision, choose_strategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract


def _all_checks(contracts: list[type[StrategyContract]], folder: str) -> list[str]:
    """Every check of the contracts on this rank, in one pair of processes: starting them is what costs."""
    return [name for contract in contracts for name in contract().run_on_this_rank(folder)]


class DDPContract(StrategyContract):
    size = 2

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        strategy = choose_strategy(world, precision)
        assert type(strategy) is DDPStrategy
        return strategy


class DDPFindingUnusedContract(DDPContract):
    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        options = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
        return choose_strategy(world, precision, ddp_options=options)


def test_ddp_keeps_the_strategy_contract(tmp_path: Any) -> None:
    contracts = [DDPContract, DDPFindingUnusedContract]
    ran, _ = run_processes(2, _all_checks, contracts, str(tmp_path))
    tests = [name for name in dir(StrategyContract) if name.startswith("test_")]
    assert len(ran) == len(contracts) * len(tests)


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _two_models_in_one_backward() -> None:
    rank = current_world().rank
    first, second, frozen = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
    strategy = choose_strategy(current_world(), Precision())
    bundle = Bundle(models=[first, frozen.requires_grad_(False), second], optimizers=optimizers)
    got = strategy.prepare(bundle)
    assert [type(m) for m in got.models] == [DistributedDataParallel, nn.Linear, DistributedDataParallel]
    x = torch.full((1, 1), float(rank))
    strategy.backward(got.models[0](x).sum() + 2 * got.models[2](x).sum())
    assert (first.weight.grad.item(), second.weight.grad.item()) == (0.5, 1.0)
    assert got.optimizers[0].param_groups[0]["params"][0] is first.weight


def _evaluation_and_ready_wrapped_models() -> None:
    strategy = choose_strategy(current_world(), choose_precision("bf16", "cpu"))
    plain = nn.Linear(2, 2)
    (judge,) = strategy.prepare(Bundle(models=[plain], evaluation=True)).models
    assert judge is plain
    own = DistributedDataParallel(nn.Linear(2, 2))
    (kept,) = strategy.prepare(Bundle(models=[own])).models
    assert kept is own
    assert kept(torch.ones(1, 2)).dtype == torch.float32
    assert strategy.unwrap(kept) is own.module


def _mixed_precision_overflow_on_one_rank_skips_on_all() -> None:
    world = current_world()
    strategy = choose_strategy(world, choose_precision("fp16", "cpu"))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (ddp,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    before = model.weight.detach().clone()
    x = torch.full((1, 2), float("inf") if world.rank == 1 else 1.0)
    strategy.backward(ddp(x).sum())
    assert not strategy.step(optimizer).ran
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    strategy.backward(ddp(torch.ones(1, 2)).sum() * 1e-3)
    assert strategy.step(optimizer).ran
    assert not torch.equal(model.weight, before)


def _hooks_compress_and_still_average() -> None:
    rank = current_world().rank
    for options in (
        DistributedDataParallelKwargs(comm_hook="fp16"),
        DistributedDataParallelKwargs(
            comm_hook="power_sgd",
            comm_state_option={"start_powerSGD_iter": 2, "matrix_approximation_rank": 1},
        ),
        DistributedDataParallelKwargs(
            comm_hook="power_sgd", comm_wrapper="fp16", comm_state_option={"start_powerSGD_iter": 2}
        ),
        DistributedDataParallelKwargs(
            comm_hook="batched_power_sgd",
            comm_state_option={"start_powerSGD_iter": 2, "matrix_approximation_rank": 2},
        ),
        DistributedDataParallelKwargs(
            comm_hook="batched_power_sgd",
            comm_wrapper="fp16",
            comm_state_option={"start_powerSGD_iter": 2, "matrix_approximation_rank": 3},
        ),
    ):
        strategy = choose_strategy(current_world(), Precision(), ddp_options=options)
        model = nn.Linear(3, 3, bias=False)
        (ddp,) = strategy.prepare(Bundle(models=[model])).models
        exact = torch.full((3, 3), (1 + 1 / 3) / 2)
        for _ in range(4):
            model.zero_grad()
            strategy.backward(ddp(torch.full((1, 3), 1.0 if rank == 0 else 1 / 3)).sum())
            torch.testing.assert_close(model.weight.grad, exact, rtol=0.01, atol=0.01)
        if options.comm_hook.value == "fp16":
            assert not torch.equal(model.weight.grad, exact)  # it really went through 16 bits


def _buffers_follow_rank_0_unless_told_otherwise() -> None:
    rank = current_world().rank
    for follow in (True, False):
        options = DistributedDataParallelKwargs(broadcast_buffers=follow)
        strategy = choose_strategy(current_world(), Precision(), ddp_options=options)
        model = nn.BatchNorm1d(1)
        (ddp,) = strategy.prepare(Bundle(models=[model])).models
        for _ in range(2):
            strategy.backward(ddp(torch.full((2, 1), float(rank))).sum())
        local = 0.1 if follow else 0.19
        assert model.running_mean.item() == pytest.approx(local * rank)


def _the_same_as_the_replicated_strategy() -> None:
    from acc_plugins.strategies.replicated import ReplicatedStrategy

    world = current_world()
    weights = []
    for kind in (DDPStrategy, ReplicatedStrategy):
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        strategy = kind(world, Precision())
        got = strategy.prepare(Bundle(models=[model], optimizers=[optimizer]))
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(6):
            x = torch.randn(5, 4, generator=generator)
            with strategy.without_sync(got.models[0]) if step % 3 else nullcontext():
                strategy.backward(got.models[0](x).square().mean(), divisor=2)
            if step % 3 == 0:
                strategy.clip_norm(model.parameters(), 0.1)
                strategy.step(optimizer)
                optimizer.zero_grad()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    everyone = world.comm.all_gather(weights[0])
    assert torch.equal(everyone[0], everyone[1])


def _a_static_graph_accumulates() -> None:
    rank = current_world().rank
    options = DistributedDataParallelKwargs(static_graph=True)
    strategy = choose_strategy(current_world(), Precision(), ddp_options=options)
    (ddp,) = strategy.prepare(Bundle(models=[nn.Linear(1, 1)])).models
    for _ in range(3):
        for step in range(2):
            with nullcontext() if step else strategy.without_sync(ddp):
                strategy.backward(ddp(torch.full((1, 1), float(step + rank))).sum())
        assert ddp.module.weight.grad.item() == 2
        ddp.zero_grad()


def _prepared(model: nn.Module, **options: Any) -> tuple[Strategy, DistributedDataParallel]:
    strategy = choose_strategy(
        current_world(), Precision(), ddp_options=DistributedDataParallelKwargs(**options)
    )
    (ddp,) = strategy.prepare(Bundle(models=[model])).models
    return strategy, ddp


def _a_user_may_register_a_hook_and_sees_the_buckets() -> None:
    shared = {}
    for cap, view in ((1, False), (100, True)):
        buckets: list[int] = []

        def halving(state, bucket):  # torch refuses annotations that are text
            state.append(bucket.index())
            future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / 4)

        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 1))
        strategy, ddp = _prepared(model, bucket_cap_mb=cap, gradient_as_bucket_view=view)
        ddp.register_comm_hook(buckets, halving)
        for _ in range(2):  # torch lays the buckets out anew after the first
            buckets.clear()
            ddp.zero_grad()
            strategy.backward(ddp(torch.ones(1, 512)).sum())
        assert model[2].bias.grad.item() == 0.5  # a quarter of the sum, where torch takes half
        shared[cap] = len(set(buckets))
        memories = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert (len(memories) < 6) == view
    assert shared[1] > 1 == shared[100]


def _unused_parameters() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x: Tensor, used: list[int]) -> Tensor:
            return sum(self.parts[i](x) for i in used)

    rank = current_world().rank
    strategy, ddp = _prepared(Forked(), find_unused_parameters=True)
    x = torch.ones(1, 1)
    for accumulating in (False, True):
        ddp.zero_grad()
        with strategy.without_sync(ddp) if accumulating else nullcontext():
            loss = ddp(x, [0, 1] if rank == 0 else [0]).sum()
            with strategy.sync_next_backward(ddp):
                strategy.backward(loss)
        got = [None if part.weight.grad is None else part.weight.grad.item() for part in ddp.module.parts]
        assert got == [1.0, 0.5, None]
    strategy, ddp = _prepared(Forked())
    strategy.backward(ddp(x, [0]).sum())
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        ddp(x, [0])


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        out: Tensor = getattr(self, branch)(x)
        return out


def _what_a_resumed_window_has_held_is_averaged_though_torch_has_not_seen_it() -> None:
    x = torch.full((1, 1), 1.0 + current_world().rank)
    saved: dict[str, Any] = {}
    for resumed in (False, True):
        strategy, ddp = _prepared(_Branches(), find_unused_parameters=True)
        if resumed:
            strategy.note_held(ddp, True)
            for name, place in strategy.gradient_places(ddp).items():
                place.give(saved[name])
        else:
            with strategy.without_sync(ddp):
                strategy.backward(ddp(x, "a").sum())
            saved = {name: place.take() for name, place in strategy.gradient_places(ddp).items()}
            saved = {name: None if one is None else one.clone() for name, one in saved.items()}
            assert saved["a.weight"].item() == x.item()
        strategy.backward(ddp(x, "b").sum())
        assert [p.grad.item() for p in ddp.parameters()] == [1.5, 1.5]
        assert not strategy._windows.open_models()


def _a_backward_behind_the_block_of_its_forward_is_exchanged_by_the_step() -> None:
    strategy, ddp = _prepared(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before = ddp.module.weight.item()
    with strategy.without_sync(ddp):
        loss = ddp(torch.full((1, 1), 1.0 + current_world().rank)).sum()
    strategy.backward(loss)
    strategy.step(optimizer)
    assert ddp.module.weight.item() == pytest.approx(before - 1.5)


def _a_usual_step_sends_nothing_of_ours() -> None:
    strategy, ddp = _prepared(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    strategy.exchange_model = pytest.fail
    for accumulating in (False, True):
        if accumulating:
            with strategy.without_sync(ddp):
                strategy.backward(ddp(torch.ones(1, 1)).sum())
        strategy.backward(ddp(torch.ones(1, 1)).sum())
        strategy.step(optimizer)


def _mixed_dtypes_and_every_other_option() -> None:
    rank = current_world().rank

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.wide = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 1).double()
            self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.low(x.bfloat16()).double())

    torch.manual_seed(rank)
    strategy, ddp = _prepared(Mixed(), dim=0, check_reduction=True, broadcast_buffers=False)
    strategy.backward(ddp(torch.full((1, 2), 1.0 + rank)).sum())
    for p in ddp.parameters():
        assert p.grad.dtype == p.dtype
        both = strategy.world.comm.all_gather(
            torch.cat([p.detach().reshape(-1), p.grad.reshape(-1)]).double()
        )
        assert torch.equal(both[0], both[1])
    twice, also_prepared = strategy.prepare(Bundle(models=[ddp, nn.Linear(1, 1)])).models
    assert twice is ddp
    assert isinstance(also_prepared, DistributedDataParallel)


def _bf16_hook_on_gloo() -> None:
    options = DistributedDataParallelKwargs(comm_hook="bf16")
    strategy = choose_strategy(current_world(), Precision(), ddp_options=options)
    with pytest.raises(ValueError, match=r"comm_hook=bf16 cannot be used here.*NCCL.*Use fp16"):
        strategy.prepare(Bundle(models=[nn.Linear(1, 1)]))
    around = DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="bf16")
    strategy = choose_strategy(current_world(), Precision(), ddp_options=around)
    with pytest.raises(ValueError, match=r"comm_wrapper=bf16 cannot be used here.*Use fp16"):
        strategy.prepare(Bundle(models=[nn.Linear(1, 1)]))


def _what_is_unfrozen_later_is_an_error() -> None:
    for frozen in ("all", "some"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        (model if frozen == "all" else model[1]).requires_grad_(False)
        strategy = choose_strategy(current_world(), Precision())
        (made,) = strategy.prepare(Bundle(models=[model])).models
        if frozen == "some":
            strategy.backward(made(torch.ones(1, 2)).sum())
        model.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"was frozen when the model was prepared.*before prepare"):
            strategy.backward(made(torch.ones(1, 2)).sum())


def test_what_only_processes_can_show() -> None:
    run_processes(
        2,
        _run_all,
        [
            _two_models_in_one_backward,
            _evaluation_and_ready_wrapped_models,
            _mixed_precision_overflow_on_one_rank_skips_on_all,
            _hooks_compress_and_still_average,
            _what_is_unfrozen_later_is_an_error,
            _buffers_follow_rank_0_unless_told_otherwise,
            _the_same_as_the_replicated_strategy,
            _a_static_graph_accumulates,
            _a_user_may_register_a_hook_and_sees_the_buckets,
            _unused_parameters,
            _what_a_resumed_window_has_held_is_averaged_though_torch_has_not_seen_it,
            _a_backward_behind_the_block_of_its_forward_is_exchanged_by_the_step,
            _a_usual_step_sends_nothing_of_ours,
            _mixed_dtypes_and_every_other_option,
            _bf16_hook_on_gloo,
        ],
    )


def _mismatch() -> None:
    choose_strategy(current_world(), Precision()).prepare(
        Bundle(models=[nn.Linear(2, 2 + current_world().rank)])
    )


def test_different_models_are_an_error_and_no_hang() -> None:
    with pytest.raises(RankFailed, match="the ranks built different models"):
        run_processes(2, _mismatch, timeout_s=60)
