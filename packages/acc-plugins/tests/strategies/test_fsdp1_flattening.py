"""What FSDP version 1 cannot lay into one flat parameter is named before anything is wrapped; what it can is what torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.precisions.amp import BFloat16Autocast
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.fsdp1_flattening import flat_parameters
from acc_plugins.strategies.strategy import Bundle


class Net(nn.Module):
    """Two blocks with a norm each, one more layer, and whatever else is put into the root."""

    def __init__(self, **more: torch.Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.head = nn.Linear(4, 1)
        for name, value in more.items():
            setattr(self, name, nn.Parameter(value, requires_grad=value.is_floating_point()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def strategy_of(world: World, precision: Precision | None = None, **options: Any) -> FSDP1Strategy:
    options = {"auto_wrap_policy": is_block, **options}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    return FSDP1Strategy(world, precision or Precision(), plugin)


def changed(change: Callable[[Any], object], **more: torch.Tensor) -> Net:
    model = Net(**more)
    change(model)
    return model


MERGED: dict[str, Any] = {"use_orig_params": False}
SHOWN: dict[str, Any] = {"use_orig_params": True}


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (
            lambda: Net(scale=torch.tensor(1.0)),
            SHOWN,
            "scale of Net is a number without a dimension.*fsdp_version=2",
        ),
        (lambda: Net(scale=torch.tensor(1.0)), MERGED, "ignored_modules, or give it one dimension"),
        (lambda: Net(code=torch.ones(2, dtype=torch.int8)), SHOWN, "code of Net holds numbers of torch.int8"),
        (
            lambda: changed(lambda m: m.blocks[1][1].half()),
            SHOWN,
            "blocks.1.0.weight of Net holds numbers of torch.float32 and blocks.1.1.weight of torch.float16",
        ),
        (
            lambda: changed(lambda m: m.blocks[1][0].requires_grad_(False)),
            MERGED,
            "blocks.1.0.weight of Net is frozen and blocks.1.1.weight is trained.*use_orig_params=True",
        ),
        (
            lambda: changed(lambda m: m.blocks[0].requires_grad_(False), late=torch.ones(2).half()),
            SHOWN,
            "late of Net holds numbers of torch.float16 and head.weight of torch.float32",
        ),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_what_does_not_fit_is_named_and_no_model_is_changed(
    alone: World, model: Callable[[], Net], options: dict[str, Any], said: str, others: int
) -> None:
    models: list[nn.Module] = [*(Net() for _ in range(others)), model()]
    before = [(name, type(part)) for one in models for name, part in one.named_modules()]
    parameters = [id(p) for one in models for p in one.parameters()]
    with pytest.raises(ValueError, match=said):
        strategy_of(alone, **options).prepare(Bundle(models=models))
    assert [(name, type(part)) for one in models for name, part in one.named_modules()] == before
    assert [id(p) for one in models for p in one.parameters()] == parameters


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1, momentum=0.9), None),
        (lambda m: torch.optim.SGD([m.head.weight], lr=0.1), "trains head.weight but not head.bias"),
    ],
)
def test_an_optimizer_that_cannot_follow_is_refused_before_the_model_is_changed(
    alone: World, optimizer: Callable[[Net], Any], said: str | None
) -> None:
    model = Net()
    made = optimizer(model)
    if said is not None:
        with pytest.raises(ValueError, match=said):
            strategy_of(alone).prepare(Bundle(models=[model], optimizers=[made]))
        assert not any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    if said is None:
        with pytest.raises(ValueError, match=r"SGD has state for head\.weight already"):
            strategy_of(alone).prepare(Bundle(models=[model], optimizers=[made]))
        assert not any(isinstance(part, FullyShardedDataParallel) for part in model.modules())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Net, {}),
        (Net, {"auto_wrap_policy": None}),
        (Net, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}),
        (Net, {"ignored_modules": "head"}),
        (Net, {"ignored_modules": r"blocks\.0\.1"}),
        (Net, {"mixed_precision_policy": "bf16"}),  # torch wraps norms alone
        (lambda: changed(lambda m: m.blocks[0].requires_grad_(False)), {}),
        (lambda: changed(lambda m: m.blocks[0].half()), {}),
        (lambda: changed(lambda m: m.blocks[0][1].requires_grad_(False)), {"mixed_precision_policy": "bf16"}),
        (lambda: Net(none=torch.ones(0, 3)), {}),
    ],
)
def test_flat_parameters_are_those_that_torch_makes(
    alone: World, model: Callable[[], Net], options: dict[str, Any]
) -> None:
    made = model()
    strategy = strategy_of(alone, **options)
    told = [[name for name, _ in flat] for flat in flat_parameters(made, strategy.plugin)]
    wrapped = strategy.prepare(Bundle(models=[made])).models[0]
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(wrapped)
    names = {id(unit): prefix for prefix, unit in wrapped.named_modules()}
    torchs = [
        [
            ".".join(
                part
                for part in f"{names[id(unit)]}.{own}".split(".")
                if part and part != "_fsdp_wrapped_module"
            )
            for own in unit._handle.flat_param._fqns
        ]
        for unit in units
        if unit._handle is not None
    ]
    assert sorted(told) == sorted(torchs)


def test_weights_that_mixed_precision_makes_float32_fit_together(alone: World) -> None:
    made = changed(lambda m: m.blocks[0][0].bfloat16())
    strategy_of(alone, BFloat16Autocast(torch.device("cpu"))).prepare(Bundle(models=[made]))
    with pytest.raises(ValueError, match=r"blocks\.0\.0\.weight of Net holds numbers of torch\.bfloat16"):
        strategy_of(alone).prepare(Bundle(models=[changed(lambda m: m.blocks[0][0].bfloat16())]))
