"""FSDP version 2 on real gloo processes: what only shards can show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import whole
from sharded import (
    BY_CLASS,
    BY_SIZE,
    HAS_FSDP2,
    Model,
    fsdp2,
    is_linear,
    make_blocks,
    prepared,
    trains_alike,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins.strategies import fsdp_utils
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.strategies.strategy import Bundle

pytestmark = pytest.mark.skipif(not HAS_FSDP2, reason="this torch has no FSDP version 2 on a CPU")


def _run_all(functions: list[Callable[[], None]]) -> list[str]:
    torch.set_num_threads(1)
    for function in functions:
        function()
    return [function.__name__ for function in functions]


def every_policy_chooses_blocks_of_any_nesting_and_trains_alike() -> None:
    for options, units in (
        (BY_CLASS, ["", "groups.a.0", "groups.a.1", "last"]),
        (BY_SIZE, ["", "emb", "groups.a.0.fc", "groups.a.1.fc", "last.fc", "head"]),
        ({"auto_wrap_policy": is_linear}, ["", "groups.a.0.fc", "groups.a.1.fc", "last.fc", "head"]),
        ({}, [""]),
    ):
        strategy = fsdp2(**options)
        made = prepared(strategy, make_blocks())
        found = [name for name, part in made[0].named_modules() if isinstance(part, FSDPModule)]
        assert sorted(found) == sorted(units), (options, found)
        trains_alike(strategy, *made)


def weights_that_units_share_stay_one() -> None:
    strategy = fsdp2(**BY_CLASS)
    model, *others = prepared(strategy, make_blocks(tied=True))
    trains_alike(strategy, model, *others)
    assert model.head.weight is model.emb.weight
    found = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert found == ["", "groups.a.1"]


def only_rank_0_has_the_weights() -> None:
    for tied in (False, True):
        model = make_blocks(tied=tied)
        reference = copy.deepcopy(model)
        if not current_world().is_main:
            with torch.device("meta"):
                model = Model(tied=tied).double()
        strategy = fsdp2(**BY_CLASS, cpu_ram_efficient_loading=True)
        kind = torch.optim.Adam if tied else torch.optim.Adagrad  # which makes its state at once, on meta too
        optimizer, own = (kind(m.parameters(), lr=0.01) for m in (model, reference))
        made = strategy.prepare(Bundle(models=[model], optimizers=[optimizer]))
        assert made.models[0].shift.equal(reference.shift)
        trains_alike(strategy, made.models[0], made.optimizers[0], reference, own)
        assert (model.head.weight is model.emb.weight) == tied


def a_model_that_nobody_has_values_for_begins_as_its_modules_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        lost = Model()
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    strategy = fsdp2()
    torch.manual_seed(5 + current_world().rank)
    (made,) = strategy.prepare(Bundle(models=[model])).models
    for (name, value), other in zip(made.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(whole(value), other), name
    with pytest.raises(ValueError, match=r"scale of Model is on the meta device on rank 0.*reset_parameters"):
        strategy.prepare(Bundle(models=[lost]))


def frozen_weights_and_adapters_train_alike() -> None:
    model = make_blocks()
    for name, p in model.named_parameters():
        p.requires_grad_(".fc.bias" in name or name == "head.weight")
    strategy = fsdp2(**BY_CLASS)
    made = prepared(strategy, model)
    trains_alike(strategy, *made)
    assert [name for name, p in made[0].named_parameters() if p.requires_grad] == [
        name for name, p in made[2].named_parameters() if p.requires_grad
    ]


def ignored_modules_stay_whole_and_are_averaged() -> None:
    for ignored in (r"last|groups\.a\.1\.fc", "modules"):
        model = make_blocks()
        said = ignored if ignored != "modules" else [model.last]
        strategy = fsdp2(**BY_CLASS, ignored_modules=said)
        made = prepared(strategy, model)
        names = [name for name, p in made[0].named_parameters() if not hasattr(p, "placements")]
        assert "scale" in names
        assert "last.fc.weight" in names
        assert "groups.a.0.fc.weight" not in names
        assert list(made[0].state_dict()) == list(made[2].state_dict())
        trains_alike(strategy, *made)


def ignored_modules_may_be_unfrozen_later() -> None:
    model = make_blocks()
    model.last.requires_grad_(False)
    strategy = fsdp2(**BY_CLASS, ignored_modules="last")
    made = prepared(strategy, model)
    for one in (made[0], made[2]):
        one.last.requires_grad_(True)
    trains_alike(strategy, *made)


def running_statistics_are_rank_0_s() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    strategy = fsdp2()
    (made,) = strategy.prepare(Bundle(models=[model])).models
    x = torch.full((3, 2), 1.0 + current_world().rank)
    with strategy.without_sync(made):
        strategy.backward(made(x).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.1 * x[0, 0].item())
    strategy.backward(made(x).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.19)
    assert model[0].num_batches_tracked.item() == 2


def complex_weights_are_clipped_with_the_others() -> None:
    values = torch.arange(8, dtype=torch.float64).view(4, 2)
    model = nn.ParameterDict(
        {"z": nn.Parameter(torch.complex(values, -values)), "x": nn.Parameter(values.clone())}
    )
    reference = copy.deepcopy(model)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = model

        def forward(self, x: Tensor) -> Tensor:
            return ((self.p["z"].abs() + self.p["x"]) * x).sum()

    strategy = fsdp2()
    (made,) = strategy.prepare(Bundle(models=[Both()])).models
    for kind in (1.0, 2.0, float("inf")):
        made.zero_grad()
        reference.zero_grad()
        strategy.backward(made(values + 1))
        ((reference["z"].abs() + reference["x"]) * (values + 1)).sum().backward()
        norm = strategy.clip_norm(made.parameters(), 0.5, kind)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, kind))


def optimizers_follow_in_any_order_with_their_state_and_groups() -> None:
    for order in ("together", "optimizer first", "model first"):
        model = make_blocks()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for step in range(2):  # a run that began before
            tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(10 + step))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reference, own = copy.deepcopy((model, optimizer))
        strategy = fsdp2(**BY_CLASS)
        bundles = [Bundle(models=[model], optimizers=[optimizer])]
        if order != "together":
            bundles = [Bundle(optimizers=[optimizer]), Bundle(models=[model])]
        for bundle in bundles if order != "model first" else reversed(bundles):
            strategy.prepare(bundle)
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(group["params"]) for group in own.param_groups
        ]
        assert optimizer.state[model.head.weight]["exp_avg"].placements == model.head.weight.placements
        trains_alike(strategy, model, optimizer, reference, own)


def models_of_several_prepares_share_a_backward_and_a_norm() -> None:
    models = [make_blocks(seed) for seed in (1, 2)]
    references = copy.deepcopy(models)
    strategy = fsdp2(**BY_CLASS)
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    own = torch.optim.SGD([p for m in references for p in m.parameters()], lr=0.1)
    strategy.prepare(Bundle(models=models[:1], optimizers=[optimizer]))
    strategy.prepare(Bundle(models=models[1:]))
    world = strategy.world
    tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(world.size)[world.rank]
    strategy.backward((models[0](mine) * models[1](mine)).mean())
    (references[0](tokens) * references[1](tokens)).mean().backward()
    for kind in (1.0, 2.0, 3.0, float("inf")):
        parameters = [p for m in models for p in m.parameters()]
        expected = [p for m in references for p in m.parameters()]
        norm = strategy.clip_norm(iter(parameters), 0.5, kind)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, 0.5, kind))
    optimizer.step()
    own.step()
    for p, q in zip(parameters, expected, strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach())


def dropout_is_the_same_when_a_block_computes_again() -> None:
    gradients = []
    for again in (False, True):
        strategy = fsdp2(**BY_CLASS, activation_checkpointing=again)
        model, *_ = prepared(strategy, make_blocks(dropout=0.5))
        torch.manual_seed(7)
        strategy.backward(model(torch.arange(16).view(4, 4)).square().mean())
        gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def trained_weights_become_float32_under_mixed_precision_and_frozen_ones_do_not() -> None:
    model = make_blocks().bfloat16()
    model.emb.requires_grad_(False)
    strategy = fsdp2(choose_precision("bf16", "cpu"), **BY_CLASS)
    (made,) = strategy.prepare(Bundle(models=[model])).models
    assert {p.dtype for p in made.parameters() if p.requires_grad} == {torch.float32}
    assert made.emb.weight.dtype is torch.bfloat16
    seen: list[torch.dtype] = []
    made.last.fc.register_forward_hook(lambda fc, _, out: seen.extend((fc.weight.dtype, out.dtype)))
    out = made(torch.arange(8).view(2, 4))
    strategy.backward(out.mean())
    assert (out.dtype, seen) == (torch.float32, [torch.bfloat16, torch.bfloat16])


def a_model_for_evaluation_and_a_sharded_one_come_back_as_they_are() -> None:
    strategy = fsdp2(**BY_CLASS)
    (judge,) = strategy.prepare(Bundle(models=[make_blocks()], evaluation=True)).models
    assert type(judge) is Model
    (model,) = strategy.prepare(Bundle(models=[judge])).models
    assert isinstance(model, FSDPModule)
    parameters = list(model.parameters())
    (again,) = strategy.prepare(Bundle(models=[model])).models
    assert again is model
    assert all(p is q for p, q in zip(again.parameters(), parameters, strict=True))


def another_function_that_prepares_models_is_used() -> None:
    seen: list[Any] = []
    own = fsdp_utils.fsdp2_prepare_model

    def mine(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append((accelerator.state.fsdp_plugin.fsdp_version, accelerator.is_main_process))
        return own(accelerator, model)

    fsdp_utils.fsdp2_prepare_model = mine
    try:
        prepared(fsdp2(), make_blocks())
    finally:
        fsdp_utils.fsdp2_prepare_model = own
    assert seen == [(2, current_world().is_main)]


def compiled_before_or_after_it_trains_alike() -> None:
    for compiled in (True, False):
        model, reference = make_blocks(), make_blocks()
        strategy = fsdp2(**BY_CLASS)
        optimizer, own = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
        given = torch.compile(model, backend="eager") if compiled else model
        made = strategy.prepare(Bundle(models=[given], optimizers=[optimizer])).models[0]
        assert strategy.unwrap(made) is model
        if not compiled:
            made = torch.compile(made, backend="eager")
        with strategy.without_sync(made):
            strategy.backward(made(torch.arange(4).view(1, 4)).mean())
        assert all(p.grad is None for p in model.parameters() if hasattr(p, "placements"))
        with strategy.without_sync(made):
            strategy.backward(made(torch.arange(4).view(1, 4)).mean(), divisor=-1)  # takes the first back
        trains_alike(strategy, made, optimizer, reference, own)


SCENARIOS = [
    every_policy_chooses_blocks_of_any_nesting_and_trains_alike,
    weights_that_units_share_stay_one,
    only_rank_0_has_the_weights,
    a_model_that_nobody_has_values_for_begins_as_its_modules_do,
    frozen_weights_and_adapters_train_alike,
    ignored_modules_stay_whole_and_are_averaged,
    ignored_modules_may_be_unfrozen_later,
    running_statistics_are_rank_0_s,
    complex_weights_are_clipped_with_the_others,
    optimizers_follow_in_any_order_with_their_state_and_groups,
    models_of_several_prepares_share_a_backward_and_a_norm,
    dropout_is_the_same_when_a_block_computes_again,
    trained_weights_become_float32_under_mixed_precision_and_frozen_ones_do_not,
    a_model_for_evaluation_and_a_sharded_one_come_back_as_they_are,
    another_function_that_prepares_models_is_used,
    compiled_before_or_after_it_trains_alike,
]


def test_what_only_shards_can_show() -> None:
    ran, _ = run_processes(2, _run_all, SCENARIOS)
    assert len(ran) == len(SCENARIOS)
