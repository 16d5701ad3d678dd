"""Weights in 8 bits to a folder, with a stand-in for bitsandbytes' parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    dispatch_model,
    load_checkpoint_in_model,
    load_offloaded_weight,
    quantize_and_offload_8bit,
    quantized,
    save_weights,
)
from acc_bigmodel.stores.folder import weight_of
from acc_ops.fake_accelerator import fake_accelerator


class Int8Params(nn.Parameter):
    """Quantises each row when it is moved to a device that computes."""

    SCB: torch.Tensor | None

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, SCB: Any = None) -> Int8Params:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.SCB = SCB
        return made

    def to(self, device: torch.device, **_: Any) -> Int8Params:
        if self.dtype == torch.int8:
            return Int8Params(self.data.to(device), SCB=self.SCB)
        values = self.data.to(device)
        scale = values.abs().amax(dim=1).float()  # (out,)
        return Int8Params((values / scale[:, None] * 127).round().to(torch.int8), SCB=scale)


class Linear8bit(nn.Linear):
    """Computes with a quantised weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight * (weight.SCB[:, None] / 127), self.bias)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(quantized, "require", lambda *_, **__: None)
    return eight_bit_model()


def eight_bit_model() -> nn.Module:
    model = nn.Sequential(Linear8bit(3, 2, device="meta")).requires_grad_(False)
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
    with pytest.raises(ValueError, match=r"'0\.wieght' is no parameter or buffer"):
        quantize_and_offload_8bit(model, WEIGHT, "0.wieght", None, tmp_path, {}, None)
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


BIAS = torch.tensor([1.0, -1.0])
IN_8_BITS = {
    "0.weight": torch.tensor([[64, -127, 0], [127, 64, -127]], dtype=torch.int8),
    "0.SCB": torch.tensor([2.0, 0.5]),
    "0.bias": BIAS,
}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("stored", ["in 16 bits", "in 8 bits"])
@pytest.mark.parametrize("told", ["the index", "the folder"])
def test_a_checkpoint_is_loaded_to_the_disk_in_8_bits_and_runs_from_there(
    model: nn.Module, tmp_path: Path, safe: bool, stored: str, told: str
) -> None:
    state = IN_8_BITS if stored == "in 8 bits" else {"0.weight": WEIGHT, "0.bias": BIAS}
    save_weights(state, tmp_path, "model", safe=safe)
    folder = tmp_path / "off"
    report = load_checkpoint_in_model(
        model, tmp_path, {"": "disk"}, folder, offload_8bit_bnb=True, strict=True
    )
    assert set(report.index) == {"0.weight", "0.SCB", "0.bias"}
    assert report.cast == (("0.weight",) if stored == "in 16 bits" else ())
    assert (report.written_bytes == 0) == (safe and stored == "in 8 bits")
    assert set(report.where) == {"0.weight", "0.bias"}
    assert all(Path(file).is_file() for file in report.where.values())
    assert (model[0].weight.dtype, model[0].weight.is_meta, type(model[0].weight)) == (
        torch.int8,
        True,
        Int8Params,
    )
    index = report.index if told == "the index" else None
    dispatch_model(model, {"": "disk"}, offload_dir=folder, offload_index=index)
    x = torch.eye(3)
    for _ in range(2):
        found = model(x).T - BIAS[:, None]
        assert torch.allclose(found, IN_8_BITS["0.weight"] * IN_8_BITS["0.SCB"][:, None] / 127)
    assert torch.equal(model.state_dict()["0.weight"], IN_8_BITS["0.weight"])


def test_only_what_is_for_the_disk_and_of_that_class_is_quantised(model: nn.Module, tmp_path: Path) -> None:
    model.append(nn.Linear(2, 2, device="meta")).append(Linear8bit(2, 2, device="meta"))
    model[2].weight = Int8Params(torch.empty(2, 2, device="meta"))
    ones = {f"{layer}.{name}": torch.ones(2, 2)[: 2 if name == "weight" else 1].squeeze(0)
            for layer in (1, 2) for name in ("weight", "bias")}  # fmt: skip
    save_weights({"0.weight": WEIGHT, "0.bias": BIAS, **ones}, tmp_path, "model")
    homes, folder = {"": "disk", "2": "cpu"}, tmp_path / "off"
    report = load_checkpoint_in_model(model, tmp_path, homes, folder, offload_8bit_bnb=True)
    assert {name: info["dtype"] for name, info in report.index.items()} == {
        "0.weight": "int8", "0.SCB": "float32", "0.bias": "float32", "1.weight": "float32", "1.bias": "float32",
    }  # fmt: skip
    assert report.written_bytes == 6 + 2 * 4
    assert sorted(file.name for file in folder.iterdir()) == ["0.SCB.dat", "0.weight.dat", "index.json"]
    assert model[2].weight.SCB.tolist() == [1.0, 1.0]  # on its way to the CPU


def test_a_weight_stored_in_8_bits_without_its_statistics_is_refused(
    model: nn.Module, tmp_path: Path
) -> None:
    save_weights({"0.weight": IN_8_BITS["0.weight"], "0.bias": BIAS}, tmp_path, "model")
    before = model[0].weight
    with pytest.raises(CheckpointMismatch, match=r"'0\.weight' is torch\.int8 .* lacks '0\.SCB'"):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"}, tmp_path / "off", offload_8bit_bnb=True)
    assert model[0].weight is before


def test_a_weight_that_is_not_quantised_is_named_and_nothing_changes(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Int8Params, "to", lambda self, device, **_: self)  # as without kernels
    save_weights({"0.weight": WEIGHT, "0.bias": BIAS}, tmp_path, "model")
    with pytest.raises(ValueError, match=r"'0\.weight' was not quantised on cpu"):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"}, tmp_path / "off", offload_8bit_bnb=True)
    assert model[0].weight.dtype == torch.float32
