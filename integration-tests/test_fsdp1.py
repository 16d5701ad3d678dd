"""FSDP, version 1, on real gloo processes: what only this engine does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded import fsdp1, raises_everywhere
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.kwargs import GradScalerKwargs
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.names import plain_name
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.strategies.strategy import Bundle


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _Block(nn.Module):
    calls = 0

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        _Block.calls += 1
        return self.inner(x).tanh() + x


class _Other(_Block):
    pass


def _net(seed: int = 0, block: type[_Block] = _Block) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(block(), block(), nn.Linear(4, 1)).double()


def _x() -> Tensor:
    return torch.full((2, 4), 1.0 + current_world().rank, dtype=torch.float64)


def _sgd(groups: Any, **options: Any) -> Any:
    return torch.optim.SGD(groups, lr=0.1, **options)


def _groups_of_an_optimizer() -> None:
    for orig in (False, True):
        model = _net()
        same = _sgd(
            [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
        )
        strategy = fsdp1(use_orig_params=orig)
        (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[same])).models
        shown = [len(group["params"]) for group in same.param_groups]
        assert shown == ([2, 4] if orig else [1, 0])
        before = strategy.world.comm.all_gather_object([p.detach().clone() for p in wrapped.parameters()])
        strategy.backward(wrapped(_x()).sum())
        strategy.step(same)
        after = strategy.world.comm.all_gather_object([p.detach().clone() for p in wrapped.parameters()])
        assert not all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for settings, word in ((0.0, r"lr=0.1 and .*with lr=0.0"), (None, "but not 2.weight")):
        model = _net()
        groups = [{"params": [*model[0].parameters(), *model[1].parameters()]}]
        if settings is not None:
            groups.append({"params": model[2].parameters(), "lr": settings})
        bundle = Bundle(models=[model], optimizers=[_sgd(groups)])
        raises_everywhere(
            ValueError, rf"{word}.*use_orig_params=True", lambda bundle=bundle: fsdp1().prepare(bundle)
        )
    model = _net()
    optimizer = _sgd([{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.0}])
    strategy = fsdp1(use_orig_params=True)
    (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    start = _net().state_dict()
    strategy.backward(wrapped(_x()).sum())
    strategy.step(optimizer)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        moved = {
            plain_name(n): not torch.equal(p, start[plain_name(n)]) for n, p in wrapped.named_parameters()
        }
    assert [name for name, yes in moved.items() if yes] == ["0.inner.weight", "0.inner.bias"]


def _state_before_prepare_is_refused() -> None:
    for orig in (False, True):
        model = _net()
        optimizer: Any = torch.optim.Adam(model.parameters())
        model(_x()).sum().backward()
        optimizer.step()
        bundle = Bundle(models=[model], optimizers=[optimizer])
        strategy = fsdp1(use_orig_params=orig)
        raises_everywhere(
            ValueError, "has state for 0.inner.weight", lambda s=strategy, b=bundle: s.prepare(b)
        )


def _checkpointing_computes_blocks_again_and_changes_nothing() -> None:
    gradients, calls = [], []
    for again in (False, True):
        strategy = fsdp1(
            use_orig_params=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["_Block"],
            activation_checkpointing=again,
        )
        (wrapped,) = strategy.prepare(Bundle(models=[_net()])).models
        _Block.calls = 0
        strategy.backward(wrapped(_x()).square().mean())
        calls.append(_Block.calls)
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.grad is not None])
        assert [plain_name(name) for name, _ in strategy.unwrap(wrapped).named_parameters()] == list(
            _net().state_dict()
        )
    assert calls == [2, 4]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def _ignored_modules_stay_whole_and_are_averaged() -> None:
    for said in ("list", r"1|2"):
        model = _net()
        ignored = [model[1], model[2], nn.Linear(1, 1)] if said == "list" else said
        strategy = fsdp1(ignored_modules=ignored)
        optimizer = _sgd(model.parameters())
        (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
        whole = model[1].inner.weight
        assert whole.shape == (4, 4)
        with strategy.without_sync(wrapped):
            strategy.backward(wrapped(_x()).square().mean())
        alone = strategy.world.comm.all_gather(whole.grad)
        assert not torch.equal(alone[0], alone[1])
        strategy.backward(wrapped(_x()).square().mean())
        reference = _net()
        for rank in (0, 1):
            x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
            (reference(x).square().mean()).backward()  # twice of half
        torch.testing.assert_close(whole.grad, reference[1].inner.weight.grad)
        norm = strategy.clip_norm(wrapped.parameters(), 1e9)
        every = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None])
        torch.testing.assert_close(norm, every.norm())


def _meta_starts() -> None:
    rank = current_world().rank
    expected = _net()
    with torch.device("meta" if rank else "cpu"):
        model = _net()
    model[1].inner.weight = model[0].inner.weight  # tied
    strategy = fsdp1(cpu_ram_efficient_loading=True, sync_module_states=True, use_orig_params=True)
    optimizer: Any = torch.optim.Adagrad(model.parameters())  # which makes its state at once, on meta too
    (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert torch.equal(model[0].inner.weight, expected[0].inner.weight)
        assert model[1].inner.weight is model[0].inner.weight
    strategy.backward(wrapped(_x()).sum())
    strategy.step(optimizer)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert not torch.equal(model[0].inner.weight, expected[0].inner.weight)
    with torch.device("meta"):
        empty = _net()
    raises_everywhere(
        ValueError,
        "0.inner.weight.*on the meta device on rank 0, too",
        lambda: fsdp1().prepare(Bundle(models=[empty])),
    )

    def ones(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 1.0 + rank)

    strategy = fsdp1(param_init_fn=ones)
    (wrapped,) = strategy.prepare(Bundle(models=[empty])).models
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert all((p == 1).all() for p in wrapped.parameters())  # rank 0's on both


def _clips_over_several_models() -> None:
    for orig in (False, True):
        strategy = fsdp1(use_orig_params=orig)
        models = [_net(0), _net(1)]
        first, second = strategy.prepare(
            Bundle(models=list(models), optimizers=[_sgd(m.parameters()) for m in models])
        ).models
        for norm_type in (2.0, 1.0, float("inf")):
            for model in (first, second):
                model.zero_grad()
            references = [_net(0), _net(1)]
            for rank in (0, 1):
                x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
                ((references[0](x).sum() + 3 * references[1](x).sum()) / 2).backward()
            strategy.backward(first(_x()).sum() + 3 * second(_x()).sum())
            all_of = [p for model in references for p in model.parameters()]
            for ours, theirs in (([second], references[1].parameters()), ([first, second], all_of)):
                expected = nn.utils.clip_grad_norm_(list(theirs), 1e9, norm_type)
                got = strategy.clip_norm([p for m in ours for p in m.parameters()], 1e9, norm_type)
                torch.testing.assert_close(got, expected)
            limit = float(expected) / 8
            strategy.clip_norm([*first.parameters(), *second.parameters()], limit, norm_type)
            again = strategy.clip_norm([*first.parameters(), *second.parameters()], 1e9, norm_type)
            torch.testing.assert_close(again.item(), limit, rtol=1e-4, atol=0)


def _mixed_precision() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x)

    for dtype in (torch.bfloat16, torch.float16):
        name = "bf16" if dtype is torch.bfloat16 else "fp16"
        strategy = fsdp1(choose_precision(name, "cpu"), mixed_precision_policy=name, use_orig_params=True)
        model = nn.Sequential(Spy(4, 4), nn.Linear(4, 1)).to(dtype)  # its own weights in few bits
        logger, records = logging.getLogger("acc_plugins.strategies.fsdp1"), []
        handler = logging.Handler()
        handler.emit = records.append
        logger.addHandler(handler)
        optimizer = _sgd(model.parameters())
        (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
        logger.removeHandler(handler)
        assert "0.weight" in records[0].getMessage()
        out = wrapped(_x().float())
        assert out.dtype == torch.float32
        assert seen.pop() == dtype
        strategy.backward(out.sum() * 1e-3)
        assert all(p.dtype == torch.float32 for p in wrapped.parameters())
        assert all(p.grad.dtype == torch.float32 for p in wrapped.parameters() if p.grad is not None)
        assert strategy.step(optimizer).ran


def _a_rank_without_a_shard_skips_with_the_others() -> None:
    precision = choose_precision("fp16", "cpu", scaler_options=GradScalerKwargs(init_scale=16.0))
    strategy = fsdp1(precision, use_orig_params=True)
    model = nn.Linear(1, 1, bias=False)  # one number for two ranks
    optimizer = _sgd(model.parameters())
    (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    ran = []
    for factor in (1.0, float("inf"), 1.0):
        strategy.backward(wrapped(torch.ones(1, 1)).sum() * factor)
        ran.append(strategy.step(optimizer).ran)
        optimizer.zero_grad()
    told = strategy.world.comm.all_gather_object((ran, precision.scaler.get_scale()))
    assert told == [([True, False, True], 8.0)] * 2


def _frozen_parameters() -> None:
    model = _net()
    model[0].requires_grad_(False)
    optimizer = _sgd([p for p in model.parameters() if p.requires_grad])
    strategy = fsdp1(use_orig_params=True)
    (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    strategy.backward(wrapped(_x()).sum())
    strategy.step(optimizer)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert torch.equal(model[0].inner.weight, _net()[0].inner.weight)
        assert not torch.equal(model[1].inner.weight, _net()[1].inner.weight)


def _one_plugin_serves_models_with_other_blocks() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="transformer_based_wrap", sharding_strategy="SHARD_GRAD_OP"
    )
    strategy = FSDP1Strategy(current_world(), Precision(), plugin)
    models = [_net(), _net(block=_Other)]
    for model, name in zip(models, ("_Block", "_Other"), strict=True):
        model._no_split_modules = [name]
    made = strategy.prepare(Bundle(models=list(models))).models
    assert [len(FullyShardedDataParallel.fsdp_modules(model)) for model in made] == [3, 3]
    assert all(
        unit.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        for unit in FullyShardedDataParallel.fsdp_modules(made[0])
    )
    assert strategy.prepare(Bundle(models=list(made))).models == made  # as they are


def _takes_a_module_alone(module: nn.Module) -> bool:
    return isinstance(module, _Block)


def _a_policy_may_take_the_module_alone() -> None:
    strategy = fsdp1(use_orig_params=True, auto_wrap_policy=_takes_a_module_alone)
    (wrapped,) = strategy.prepare(Bundle(models=[_net()])).models
    assert len(FullyShardedDataParallel.fsdp_modules(wrapped)) == 3


def _ignored_modules_may_be_unfrozen_later() -> None:
    model, reference = _net(), _net()
    model[2].requires_grad_(False)
    strategy = fsdp1(use_orig_params=True, ignored_modules="2")
    (wrapped,) = strategy.prepare(Bundle(models=[model])).models
    model[2].requires_grad_(True)
    strategy.backward(wrapped(_x()).square().mean())
    for rank in (0, 1):
        x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
        (reference(x).square().mean() / 2).backward()
    torch.testing.assert_close(model[2].weight.grad, reference[2].weight.grad)


def _running_statistics_are_rank_0_s() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    strategy = fsdp1(use_orig_params=True)
    (wrapped,) = strategy.prepare(Bundle(models=[model])).models
    with strategy.without_sync(wrapped):
        strategy.backward(wrapped(_x()).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.1 * (1 + current_world().rank))
    strategy.backward(wrapped(_x()).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.19)
    assert model[0].num_batches_tracked.item() == 2


def test_what_only_fsdp1_does() -> None:
    run_processes(
        2,
        _run_all,
        [
            _groups_of_an_optimizer,
            _state_before_prepare_is_refused,
            _checkpointing_computes_blocks_again_and_changes_nothing,
            _ignored_modules_stay_whole_and_are_averaged,
            _meta_starts,
            _clips_over_several_models,
            _mixed_precision,
            _a_rank_without_a_shard_skips_with_the_others,
            _frozen_parameters,
            _one_plugin_serves_models_with_other_blocks,
            _a_policy_may_take_the_module_alone,
            _ignored_modules_may_be_unfrozen_later,
            _running_statistics_are_rank_0_s,
        ],
    )
