"""precisions/fp8_torchao.py: which layers are converted to float8, and that they train."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.optional import is_available
from acc_plugins.precisions.fp8_torchao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)

needs_torchao = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")


def _model(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def test_first_and_last_are_linear_layers_in_the_models_order() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "body": _model(4, 4, 4), "act": nn.ReLU()})
    assert find_first_last_linear_layers(model) == ("body.0", "body.1")
    assert find_first_last_linear_layers(_model(4, 4)) == ("0", "0")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        (nn.Linear(16, 32), "inner", True),
        (nn.Linear(16, 32), "first", False),
        (nn.Linear(15, 32), "inner", False),
        (nn.Linear(16, 33), "inner", False),
        (nn.ReLU(), "inner", True),
        (nn.ReLU(), "first", False),
    ],
)
def test_a_layer_is_left_out_by_its_name_or_by_dimensions_that_16_does_not_divide(
    module: nn.Module, name: str, wanted: bool
) -> None:
    assert filter_linear_layers(module, name, ["first", "last"]) is wanted


def test_a_model_filters_its_own_first_and_last_layer() -> None:
    model = _model(16, 16, 16, 16)
    assert [filter_first_and_last_linear_layers(model, name) for name in "012"] == [False, True, False]


@needs_torchao
def test_only_the_inner_layers_of_fitting_dimensions_are_converted_and_weights_stay_the_same() -> None:
    model = _model(16, 32, 32, 24, 32, 16)
    weights = list(model.parameters())
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model)
    assert [type(layer).__name__ == "Float8Linear" for layer in model] == [False, True, False, False, False]
    assert has_ao_layers(model)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))


@needs_torchao
def test_a_filter_of_ones_own_decides_alone() -> None:
    model = _model(16, 32, 32, 16)
    convert_model_to_fp8_ao(model, module_filter_func=lambda _, name: name == "0")
    assert [type(layer).__name__ == "Float8Linear" for layer in model] == [True, False, False]


@needs_torchao
def test_a_converted_model_computes_and_differentiates_near_float32_but_not_in_it() -> None:
    model = _model(16, 32, 32, 16)
    converted = copy.deepcopy(model)
    convert_model_to_fp8_ao(converted)
    x = torch.randn(32, 16)
    outputs: list[Any] = []
    for each in (model, converted):
        each(x).square().mean().backward()
        outputs.append(each(x).detach())
    assert not torch.equal(outputs[0], outputs[1])
    assert (outputs[0] - outputs[1]).norm() < 0.1 * outputs[0].norm()
    for expected, got in zip(model.parameters(), converted.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        assert (expected.grad - got.grad).norm() < 0.15 * expected.grad.norm()


@pytest.mark.parametrize("call", [convert_model_to_fp8_ao, has_ao_layers])
def test_without_torchao_the_error_names_the_extra(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"acc-plugins\[torchao\]"):
        call(_model(16, 16))
