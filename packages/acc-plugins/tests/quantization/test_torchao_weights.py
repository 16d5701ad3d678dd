"""quantization/torchao_weights.py: the configurations of the real torchao, as objects and by name."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_hooks.tensors import is_plain
from acc_ops.optional import is_available, require
from acc_plugins.quantization.load import load_and_quantize_model

needs_torchao = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")
Empty = Callable[[], nn.Module]
IDS = torch.arange(8)
NAMES = {
    "int8_weight_only": 0.02,
    "Float8WeightOnlyConfig": 0.1,
    "int8_dynamic_activation_int8_weight": 0.05,
}


@needs_torchao
@pytest.mark.parametrize("name", NAMES)
def test_the_inner_weights_have_few_bits_and_compute_nearly_the_same(
    plain: nn.Module, empty: Empty, checkpoint: Path, name: str
) -> None:
    expected = plain(IDS)
    model = load_and_quantize_model(empty(), name, checkpoint)
    out = model(IDS)
    assert 0 < (out - expected).norm() < NAMES[name] * expected.norm()
    few = {key for key, tensor in model.named_parameters() if not is_plain(tensor)}
    assert few == {"body.0.weight", "body.2.weight"}
    given = load_and_quantize_model(copy.deepcopy(plain), name)
    assert torch.equal(given(IDS), out)


@needs_torchao
def test_an_object_says_the_same_as_its_name_and_the_rest_may_be_offloaded(
    empty: Empty, checkpoint: Path, tmp_path: Path
) -> None:
    kind = require("torchao.quantization", "a test").Int8WeightOnlyConfig
    expected = load_and_quantize_model(empty(), "int8_weight_only", checkpoint)(IDS)
    model = load_and_quantize_model(
        empty(), kind(), checkpoint, device_map={"": "cpu", "emb": "disk"}, offload_folder=tmp_path
    )
    assert torch.equal(model(IDS), expected)
    with pytest.raises(ValueError, match=r"'body\.0\.weight'"):
        load_and_quantize_model(empty(), kind(), checkpoint, device_map={"": "cpu", "body.0": "disk"})


@needs_torchao
def test_a_state_dict_goes_through_a_file(plain: nn.Module, tmp_path: Path) -> None:
    other = copy.deepcopy(plain)
    model = load_and_quantize_model(plain, "int8_weight_only")
    torch.save(model.state_dict(), tmp_path / "few.pt")
    other.load_state_dict(torch.load(tmp_path / "few.pt", weights_only=True), assign=True)
    assert torch.equal(other(IDS), model(IDS))


@needs_torchao
def test_a_layer_that_torchao_leaves_is_told(
    plain: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(require("torchao.quantization", "a test"), "quantize_", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        load_and_quantize_model(plain, "int8_weight_only")
    assert "Int8WeightOnlyConfig left 'body.0.weight' as it was" in caplog.text


@needs_torchao
def test_a_configuration_that_chooses_layers_itself_is_refused(plain: nn.Module) -> None:
    quantization: Any = require("torchao.quantization", "a test")
    with pytest.raises(ValueError, match=r"call torchao\.quantization\.quantize_"):
        load_and_quantize_model(plain, quantization.FqnToConfig({}))


@needs_torchao
def test_an_unknown_name_is_refused_with_the_known_ones(empty: Empty) -> None:
    with pytest.raises(
        ValueError,
        match=r"no configuration 'int8_weight' \(is 'Int8WeightOnlyConfig' meant\?\); it has .*Float8",
    ):
        load_and_quantize_model(empty(), "int8_weight", "nowhere")


def test_without_torchao_the_error_names_the_extra(empty: Empty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"acc-plugins\[torchao\]"):
        load_and_quantize_model(empty(), "int8_weight_only", "nowhere")
