"""quantization/bnb_layers.py: which linear layers are exchanged, and that the exchanged ones compute nearly the same."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.optional import is_available
from acc_plugins.options.quantization import BnbQuantizationConfig
from acc_plugins.quantization.bnb_layers import (
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)

needs_bnb = pytest.mark.skipif(not is_available("bitsandbytes"), reason="bitsandbytes is not installed")


class Small(nn.Module):
    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(8, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False))
        self.head = nn.Linear(64, 8, bias=False)
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.body(self.emb(ids)))


@needs_bnb
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (BnbQuantizationConfig(load_in_8bit=True), 0.05),
        (
            BnbQuantizationConfig(
                load_in_4bit=True, bnb_4bit_compute_dtype="fp32", bnb_4bit_quant_type="nf4"
            ),
            0.25,
        ),
        (
            BnbQuantizationConfig(
                load_in_4bit=True, bnb_4bit_compute_dtype="fp32", bnb_4bit_quant_type="fp4"
            ),
            0.25,
        ),
        (
            BnbQuantizationConfig(
                load_in_4bit=True,
                bnb_4bit_compute_dtype="fp32",
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
            ),
            0.25,
        ),
    ],
    ids=["int8", "nf4", "fp4", "double"],
)
def test_an_exchanged_model_computes_nearly_the_same_in_fewer_bits(
    settings: BnbQuantizationConfig, error: float
) -> None:
    plain = Small()
    model = replace_with_bnb_layers(copy.deepcopy(plain), settings, ["head"]).to("cpu")
    layer = model.get_submodule("body.0")
    assert type(layer).__name__ == ("Linear8bitLt" if settings.load_in_8bit else "Linear4bit")
    assert layer.weight.dtype == (torch.int8 if settings.load_in_8bit else torch.uint8)
    assert type(model.get_submodule("head")) is nn.Linear
    assert has_4bit_bnb_layers(model) is settings.load_in_4bit
    ids = torch.arange(8)
    expected, got = plain(ids), model(ids)
    assert 0 < (got - expected).norm() < error * expected.norm()


@needs_bnb
def test_a_name_leaves_out_what_is_below_it_and_not_what_only_begins_like_it() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 8)), "body2": nn.Linear(8, 8), "b": Small()})
    replace_with_bnb_layers(model, BnbQuantizationConfig(load_in_8bit=True), ["body.0", "head"])
    kept = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert kept == ["body.0", "b.body.0", "b.head"]


@needs_bnb
def test_a_layer_of_two_names_stays_one_layer() -> None:
    layer = nn.Linear(8, 8)
    model = replace_with_bnb_layers(
        nn.Sequential(layer, nn.ReLU(), layer), BnbQuantizationConfig(load_in_8bit=True)
    )
    assert model.get_submodule("0") is model.get_submodule("2") is not layer


@needs_bnb
def test_a_model_without_linear_layers_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        replace_with_bnb_layers(nn.Sequential(nn.ReLU()), BnbQuantizationConfig(load_in_8bit=True))
    assert "no linear layer of Sequential" in caplog.text


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"acc-plugins\[bnb\]"):
        has_4bit_bnb_layers(nn.ReLU())
