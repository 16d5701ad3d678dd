"""precisions/fp8_transformer_engine.py: the logic, with stand-ins for the library, which imports on a GPU machine only."""

from __future__ import annotations

import copy
import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.optional import forget_answers
from acc_ops.unwrap import extract_model_from_parallel
from acc_ops.world import current_world
from acc_plugins.options.fp8 import TERecipeKwargs
from acc_plugins.precisions import fp8_transformer_engine as subject
from acc_plugins.precisions.fp8_transformer_engine import (
    TransformerEngineAutocast,
    TransformerEngineFloat8,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import PrecisionContract


class Linear(nn.Linear):
    """As documented: other names for the arguments, and an empty tensor where there is no bias."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, params_dtype: Any, device: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)
        if not bias:
            del self.bias
            self.bias = torch.tensor([], dtype=params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen.append(("layer", active[-1] if active else None))
        return nn.functional.linear(x, self.weight, self.bias if self.bias.numel() else None)


class LayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: int, eps: float, *, params_dtype: Any, device: Any) -> None:
        super().__init__(normalized_shape, eps, dtype=params_dtype, device=device)


class Format(enum.Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


active: list[Any] = []
seen: list[Any] = []


@contextmanager
def fp8_autocast(*, enabled: bool, fp8_recipe: Any) -> Iterator[None]:
    active.append((enabled, fp8_recipe))
    try:
        yield
    finally:
        active.pop()


def _recipe(kind: str) -> Any:
    return lambda **given: {"kind": kind, **given}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A TransformerEngine that can be imported, of the parts that are used."""
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "Linear": Linear,
            "LayerNorm": LayerNorm,
            "fp8_autocast": fp8_autocast,
        },
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "DelayedScaling": _recipe("delayed"),
            "MXFP8BlockScaling": _recipe("mxfp8"),
            "Format": Format,
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    seen.clear()
    yield
    forget_answers()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Linear(32, 3)
    )


def _kinds(model: nn.Module) -> list[str]:
    return [
        f"{'te.' if type(module).__module__ == __name__ else ''}{type(module).__name__}"
        for module in model.children()
    ]


def test_layers_are_exchanged_with_their_values_there_and_back() -> None:
    model = _model()
    model[0].weight.requires_grad_(False)
    model.eval()
    x = torch.ones(2, 16)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    convert_model(model)
    assert _kinds(model) == ["te.Linear", "te.LayerNorm", "Tanh", "te.Linear", "Linear"]
    assert has_transformer_engine_layers(model)
    assert torch.equal(model(x), expected)
    assert not model[0].weight.requires_grad
    assert not model[0].training
    convert_model(model, to_transformer_engine=False)
    assert _kinds(model) == _kinds(_model())
    assert not has_transformer_engine_layers(model)
    assert model[3].bias is None
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ({"_convert_linear": False}, ["Linear", "te.LayerNorm", "Tanh", "Linear", "Linear"]),
        ({"_convert_ln": False}, ["te.Linear", "LayerNorm", "Tanh", "te.Linear", "Linear"]),
    ],
)
def test_either_kind_can_be_left_alone(choice: dict[str, bool], kinds: list[str]) -> None:
    model = _model()
    convert_model(model, **choice)
    assert _kinds(model) == kinds


def test_what_it_cannot_do_stays_and_nothing_else() -> None:
    model = nn.Sequential(
        nn.Linear(3, 16), nn.LayerNorm((2, 16)), nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 16)
    )
    convert_model(model)
    assert _kinds(model) == ["Linear", "LayerNorm", "LayerNorm", "te.Linear"]


def test_a_layer_of_two_names_stays_one_layer() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.Sequential(layer))
    convert_model(model)
    assert model[0] is model[1][0] is not layer


def test_a_forward_runs_under_the_autocast_while_its_model_trains() -> None:
    model = nn.Linear(2, 2)

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(active[-1])
        return x

    for always in (False, True):
        forward = contextual_fp8_autocast(noted, "recipe", use_during_eval=always)
        for training in (True, False):
            forward(model.train(training), torch.ones(1))
    assert seen == [(True, "recipe"), (False, "recipe"), (True, "recipe"), (True, "recipe")]


def test_a_bound_forward_of_a_model_without_items_knows_its_model() -> None:
    class Empty(nn.ModuleList):  # it is false
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(active[-1])
            return x

    TransformerEngineAutocast("recipe")(Empty().eval().forward, torch.ones(1))
    assert seen == [(False, "recipe")]


def test_the_recipe_of_the_handler_reaches_the_layers() -> None:
    model = _model()
    convert_model(model)
    handler = TERecipeKwargs(margin=2, fp8_format="E4M3", amax_history_len=8, amax_compute_algo="max")
    assert apply_fp8_autowrap(model, handler) is model
    model(torch.ones(1, 16))
    recipe = {
        "kind": "delayed",
        "margin": 2,
        "fp8_format": Format.E4M3,
        "amax_history_len": 8,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, False),
    }
    assert seen == [("layer", (True, recipe))] * 2
    seen.clear()
    model.eval()(torch.ones(1, 16))
    assert [entry[1][0] for entry in seen] == [False, False]


def test_without_a_handler_the_recipe_is_the_librarys_own() -> None:
    model = _model()
    convert_model(model)
    apply_fp8_autowrap(model, None)(torch.ones(1, 16))
    assert seen[0] == ("layer", (True, {"kind": "delayed"}))


def test_block_scaling_is_asked_for_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = TERecipeKwargs(use_mxfp8_block_scaling=True)
    with pytest.raises(ValueError, match="Blackwell"):
        apply_fp8_autowrap(_model(), handler)
    monkeypatch.setattr(subject, "is_transformer_engine_mxfp8_available", lambda: True)
    model = _model()
    convert_model(model)
    apply_fp8_autowrap(model, handler)(torch.ones(1, 16))
    assert seen[0][1][1] == {"kind": "mxfp8", "margin": 0, "fp8_format": Format.HYBRID}
    with pytest.raises(ValueError, match="amax_history_len=4"):
        apply_fp8_autowrap(_model(), TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4))


class TestTransformerEngineFloat8(PrecisionContract):
    def make_precision(self, **options: Any) -> TransformerEngineFloat8:
        assert not options
        return TransformerEngineFloat8(self.device)


def test_optimizers_follow_to_the_new_parameters() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Strategy(current_world(), TransformerEngineFloat8("cpu"))
    (wrapped,) = strategy.prepare(Bundle(models=[model], optimizers=[optimizer])).models
    assert _kinds(wrapped)[0] == "te.Linear"
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in wrapped.parameters()}
    before = copy.deepcopy(wrapped.state_dict())
    strategy.backward(wrapped(torch.ones(2, 16)).square().mean())
    strategy.step(optimizer)
    assert not torch.equal(before["0.weight"], wrapped.state_dict()["0.weight"])


@pytest.mark.parametrize("by_precision", [True, False])
def test_unwrapping_gives_torchs_layers_back_with_what_was_trained(by_precision: bool) -> None:
    precision, model = TransformerEngineFloat8("cpu"), _model()
    wrapped = precision.wrap(model)
    with torch.no_grad():
        wrapped[0].weight.fill_(0.5)
    inner = (
        precision.unwrap(wrapped)
        if by_precision
        else extract_model_from_parallel(wrapped, keep_fp32_wrapper=False)
    )
    assert inner is model
    assert _kinds(inner) == _kinds(_model())
    assert bool((inner[0].weight == 0.5).all())
    assert type(inner) is nn.Sequential


def test_layers_that_the_user_made_stay() -> None:
    model = _model()
    convert_model(model)
    precision = TransformerEngineFloat8("cpu")
    precision.unwrap(precision.wrap(model))
    assert has_transformer_engine_layers(model)


def test_it_runs_inside_what_a_precision_does_already() -> None:
    model = _model()
    convert_model(model)
    precision = TransformerEngineFloat8("cpu")
    out = apply_fp8_autowrap(precision.wrap(model), None)(torch.ones(1, 16))
    assert out.dtype == torch.float32
    assert seen[0][1][0] is True
    assert not active


@pytest.mark.parametrize(
    "call",
    [
        lambda: convert_model(_model()),
        lambda: has_transformer_engine_layers(_model()),
        lambda: apply_fp8_autowrap(_model(), None),
        lambda: contextual_fp8_autocast(print, None),
        lambda: TransformerEngineFloat8("cpu"),
    ],
)
def test_without_the_library_the_error_names_the_extra(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match=r"acc-plugins\[te\]"):
        call()
