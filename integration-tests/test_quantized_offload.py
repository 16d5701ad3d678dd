"""8-bit weights of bitsandbytes, quantised on this machine's first device, written to a folder and run from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_in_model,
    quantize_and_offload_8bit,
    save_offload_index,
    save_weights,
)
from acc_ops.devices import present_kind

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes quantises; it is not installed")


def build(weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
    with init_empty_weights():
        layers = [bnb.nn.Linear8bitLt(32, 32, has_fp16_weights=False) for _ in range(3)]
    model = nn.Sequential(*layers).requires_grad_(False).eval()
    for name, value in (weights or {}).items():
        path, _, local = name.rpartition(".")
        parameter = (
            bnb.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
            if local == "weight"
            else nn.Parameter(value, requires_grad=False)
        )
        model.get_submodule(path)._parameters[local] = parameter.to(device())
    return model


def device() -> torch.device:
    return torch.device(present_kind())


def test_a_model_of_8_bit_weights_runs_from_a_folder_as_from_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        name: torch.randn(parameter.shape, dtype=torch.float16)
        for name, parameter in build().named_parameters()
    }
    x = torch.randn(4, 32, dtype=torch.float16, device=device())
    expected = build(weights)(x)

    model = build()
    index: dict[str, Any] = {}
    for name, value in weights.items():
        quantize_and_offload_8bit(model, value, name, torch.float16, tmp_path, index, None)
    save_offload_index(index, tmp_path)
    assert {info["dtype"] for name, info in index.items() if name.endswith(".weight")} == {"int8"}
    assert sum(file.stat().st_size for file in tmp_path.glob("*.weight.dat")) == 3 * 32 * 32
    assert all(tensor.is_meta for tensor in model.parameters())
    dispatch_model(model, {"": "disk"}, main_device=device(), offload_dir=str(tmp_path), offload_index=index)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)


def test_a_checkpoint_of_16_bit_weights_is_loaded_to_a_folder_in_8_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = {
        name: torch.randn(parameter.shape, dtype=torch.float16)
        for name, parameter in build().named_parameters()
    }
    save_weights(weights, tmp_path, "model")
    x = torch.randn(4, 32, dtype=torch.float16, device=device())
    expected = build(weights)(x)

    model, folder = build(), tmp_path / "off"
    report = load_checkpoint_in_model(
        model, tmp_path, {"": "disk"}, folder, dtype=torch.float16, offload_8bit_bnb=True, strict=True
    )
    assert report.written_bytes == 3 * (32 * 32 + 32 * 4)  # the values, and a float for each row
    assert {name for name in report.index if name.endswith(".SCB")} == {f"{layer}.SCB" for layer in range(3)}
    dispatch_model(model, {"": "disk"}, main_device=device(), offload_dir=folder)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
