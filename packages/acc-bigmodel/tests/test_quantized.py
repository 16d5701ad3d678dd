"""Weights in 8 bits to a folder, with a stand-in for bitsandbytes' parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import load_offloaded_weight, quantize_and_offload_8bit, quantized
from acc_bigmodel.quantized import weight_of
from acc_ops.fake_accelerator import fake_accelerator


class Int8Params(nn.Parameter):
    """Quantises each row when it is moved to a device that computes."""

    SCB: torch.Tensor | None

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, SCB: Any = None) -> Int8Params:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.SCB = SCB
        return made

    def to(self, device: torch.device, **_: Any) -> Int8Params:  # type: ignore[override]
        if self.dtype == torch.int8:
            return Int8Params(self.data.to(device), SCB=self.SCB)
        values = self.data.to(device)
        scale = values.abs().amax(dim=1).float()  # (out,)
        return Int8Params((values / scale[:, None] * 127).round().to(torch.int8), SCB=scale)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(quantized, "require", lambda *_, **__: None)
    return eight_bit_model()


def eight_bit_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2, device="meta"))
    model[0].weight = Int8Params(torch.empty(2, 3, device="meta"))
    return model


def read(folder: Path, index: dict[str, Any], name: str) -> torch.Tensor:
    return load_offloaded_weight(folder / f"{name}.dat", index[name])


WEIGHT = torch.tensor([[1.0, -2.0, 0.0], [0.5, 0.25, -0.5]])


def test_values_and_statistics_are_written_and_the_weight_is_left_on_meta(
    model: nn.Module, tmp_path: Path
) -> None:
    index: dict[str, Any] = {}
    quantize_and_offload_8bit(model, WEIGHT, "0.weight", torch.float16, tmp_path, index, None)
    assert read(tmp_path, index, "0.weight").tolist() == [[64, -127, 0], [127, 64, -127]]
    assert read(tmp_path, index, "0.SCB").tolist() == [2.0, 0.5]
    weight = model[0].weight
    assert (weight.is_meta, weight.dtype, weight.shape) == (True, torch.int8, (2, 3))
    assert type(weight) is Int8Params
    assert list(index) == ["0.weight", "0.SCB"]


def test_the_first_accelerator_quantises(model: nn.Module, tmp_path: Path) -> None:
    index: dict[str, Any] = {}
    with fake_accelerator(count=2) as fake:
        quantize_and_offload_8bit(model, WEIGHT, "0.weight", None, tmp_path, index, None)
        assert {copy.target for copy in fake.log if copy.source.type == "cpu"} == {fake.device}
        assert fake.peak_bytes() > 0
    assert read(tmp_path, index, "0.SCB").tolist() == [2.0, 0.5]


def test_what_is_quantised_already_is_written_as_it_is(model: nn.Module, tmp_path: Path) -> None:
    values, statistics = torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([3.0, 4.0])
    index: dict[str, Any] = {}
    quantize_and_offload_8bit(model, values, "0.weight", torch.float16, tmp_path, index, statistics)
    assert torch.equal(read(tmp_path, index, "0.weight"), values)
    assert torch.equal(read(tmp_path, index, "0.SCB"), statistics)
    assert model[0].weight.is_meta


def test_a_parameter_of_another_class_is_written_in_the_dtype(model: nn.Module, tmp_path: Path) -> None:
    index: dict[str, Any] = {}
    quantize_and_offload_8bit(model, torch.ones(2), "0.bias", torch.float16, tmp_path, index, None)
    assert read(tmp_path, index, "0.bias").tolist() == [1.0, 1.0]
    assert index == {"0.bias": {"dtype": "float16", "shape": [2]}}
    assert (model[0].bias.is_meta, model[0].bias.dtype) == (True, torch.float16)


def test_an_error_leaves_the_model_as_it_was(model: nn.Module, tmp_path: Path) -> None:
    before = model[0].weight
    with pytest.raises(ValueError, match="shape"):
        quantize_and_offload_8bit(model, torch.ones(4, 4), "0.weight", None, tmp_path, {}, None)
    with pytest.raises(OSError):
        quantize_and_offload_8bit(model, WEIGHT, "0.weight", None, tmp_path / "missing", {}, None)
    with pytest.raises(AttributeError, match=r"1\.weight"):
        quantize_and_offload_8bit(model, WEIGHT, "1.weight", None, tmp_path, {}, None)
    with pytest.raises(ValueError, match="only parameters called 'weight'"):
        quantize_and_offload_8bit(model, WEIGHT, "0.bias", None, tmp_path, {}, torch.ones(2))
    assert model[0].weight is before


def test_without_bitsandbytes_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acc_ops.optional._can_be_imported", lambda _: False)
    with pytest.raises(
        ImportError, match=r'quantising a weight to 8 bits needs bitsandbytes.*pip install "bits'
    ):
        quantize_and_offload_8bit(eight_bit_model(), WEIGHT, "0.weight", None, tmp_path, {}, None)


def test_the_statistics_belong_to_a_weight() -> None:
    assert [weight_of(name) for name in ("a.SCB", "SCB", "a.weight", "a.bias")] == [
        "a.weight",
        "weight",
        "a.weight",
        "a.bias",
    ]
