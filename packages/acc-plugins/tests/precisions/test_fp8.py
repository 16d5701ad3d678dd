"""precisions/fp8.py: float8 through torchao on the CPU."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.optional import is_available, require
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.precisions.fp8 import TorchaoFloat8, has_float8_layers
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Bundle
from acc_plugins.testing import PrecisionContract

if not is_available("torchao"):
    pytest.skip("torchao is not installed", allow_module_level=True)


class TestTorchaoFloat8(PrecisionContract):
    def make_precision(self, **options: Any) -> TorchaoFloat8:
        assert not options
        return TorchaoFloat8(self.device)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 1)
    )


def _kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.children()]


def test_inner_layers_compute_in_float8_with_the_same_parameters_names_and_objects() -> None:
    model = _model()
    before, children, state = list(model.parameters()), list(model), list(model.state_dict())
    wrapped = TorchaoFloat8("cpu").wrap(model)
    assert wrapped is model
    assert _kinds(model) == ["Linear", "Tanh", "Float8Linear", "LayerNorm", "Float8Linear", "Linear"]
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(a is b for a, b in zip(model, children, strict=True))
    assert list(model.state_dict()) == state


def test_training_comes_near_float32_but_is_not_bfloat16() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    losses: list[list[float]] = []
    for precision in (
        Precision(),
        TorchaoFloat8("cpu"),
        TorchaoFloat8("cpu", module_filter_func=lambda *_: False),
    ):
        model = precision.wrap(_model())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for _ in range(20):
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            precision.scale(loss).backward()
            assert precision.step(optimizer).ran
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    plain, eight, sixteen = losses
    assert eight[-1] < 0.5 * eight[0]
    assert eight == pytest.approx(plain, rel=0.2, abs=0.01)
    assert eight != sixteen


def test_unwrap_gives_every_layer_back_and_hooks_stay_all_the_while() -> None:
    precision, model = TorchaoFloat8("cpu"), _model()
    x, calls = torch.ones(2, 16), []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    expected, before = model(x), [dict(vars(module)) for module in model.modules()]
    wrapped = precision.wrap(model)
    assert not torch.equal(wrapped(x), expected)
    assert precision.unwrap(wrapped) is model
    assert not has_float8_layers(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert torch.equal(model(x), expected)
    assert len(calls) == 3


def test_copies_and_pickles_compute_the_same_and_unwrap_on_their_own() -> None:
    precision = TorchaoFloat8("cpu")
    model = precision.wrap(_model())
    x = torch.ones(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        precision.unwrap(twin)
        assert _kinds(twin)[2] == "Linear"
        assert _kinds(model)[2] == "Float8Linear"


def test_wrapping_twice_is_wrapping_once(caplog: pytest.LogCaptureFixture) -> None:
    precision = TorchaoFloat8("cpu")
    model = precision.wrap(_model())
    expected = model(torch.ones(2, 16))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(precision.wrap(model)(torch.ones(2, 16)), expected)
    assert not caplog.records


def test_parameters_stay_plain_where_nothing_is_gathered() -> None:
    config = require("torchao.float8", "a test").Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = TorchaoFloat8("cpu", config=config).wrap(_model())
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    gathered = TorchaoFloat8("cpu", config=config, gathers_in_fp8=True).wrap(_model())
    kinds = {type(parameter).__name__ for parameter in gathered.parameters()}
    assert kinds == {"Parameter", "WeightWithDynamicFloat8CastTensor"}


def test_a_filter_of_ones_own_decides_alone() -> None:
    precision = TorchaoFloat8("cpu", module_filter_func=lambda _, name: name == "0")
    assert _kinds(precision.wrap(_model()))[0] == "Float8Linear"


def test_subclasses_of_linear_keep_their_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(16, 16), Doubled(16, 16), nn.Linear(16, 16))
    assert type(TorchaoFloat8("cpu").wrap(model)[1]) is Doubled


def test_a_model_without_a_layer_for_fp8_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TorchaoFloat8("cpu").wrap(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert "no layer of Sequential computes in fp8" in caplog.text


def test_ranks_as_threads_train_together_near_one() -> None:
    x = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1))
    start = _model()  # made once: ranks as threads share torch's generator

    def trained() -> tuple[list[float], torch.Tensor]:
        world = current_world()
        strategy = choose_strategy(world, TorchaoFloat8("cpu"))
        own = copy.deepcopy(start)
        made = strategy.prepare(Bundle(models=[own], optimizers=[torch.optim.SGD(own.parameters(), lr=0.1)]))
        (model,), (optimizer,) = made.models, made.optimizers
        losses = []
        for batch in x:
            rows = batch.chunk(world.size)[world.rank]
            loss = (model(rows) - rows.mean(1, keepdim=True)).square().mean()
            strategy.backward(loss)
            strategy.step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, own[2].weight.detach()

    alone, _ = trained()
    (one, first), (two, second) = run_threads(2, trained)
    assert torch.equal(first, second)
    assert [(a + b) / 2 for a, b in zip(one, two, strict=True)] == pytest.approx(alone, rel=0.1, abs=0.01)
