"""quantization/bnb_weights.py: 8 and 4 bits by the real bitsandbytes, from full and from packed checkpoints."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import CheckpointMismatch, open_store, save_weights
from acc_ops.optional import is_available
from acc_plugins.options.quantization import BnbQuantizationConfig
from acc_plugins.quantization.bnb_layers import replace_with_bnb_layers
from acc_plugins.quantization.bnb_weights import is_statistics
from acc_plugins.quantization.device_maps import get_quantized_model_device_map
from acc_plugins.quantization.load import load_and_quantize_model

needs_bnb = pytest.mark.skipif(not is_available("bitsandbytes"), reason="bitsandbytes is not installed")
Empty = Callable[[], nn.Module]
IDS = torch.arange(8)
ERRORS = {"int8": 0.02, "nf4": 0.25, "fp4": 0.3, "nf4-double": 0.25, "fp4-double": 0.3}


def config(name: str, **settings: Any) -> BnbQuantizationConfig:
    if name == "int8":
        return BnbQuantizationConfig(load_in_8bit=True, **{"torch_dtype": "fp32", **settings})
    kind: Any = name[:3]
    return BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=name.endswith("double"),
        bnb_4bit_compute_dtype="fp32",
        **settings,
    )


@needs_bnb
@pytest.mark.parametrize("name", ERRORS)
def test_an_empty_model_is_quantised_while_it_is_loaded_and_a_packed_one_comes_back_the_same(
    plain: nn.Module, empty: Empty, checkpoint: Path, name: str, tmp_path: Path
) -> None:
    expected = plain(IDS)
    model = load_and_quantize_model(empty(), config(name), checkpoint)
    out = model(IDS)
    assert 0 < (out - expected).norm() < ERRORS[name] * expected.norm()
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (name == "int8", name != "int8")
    save_weights(model.state_dict(), tmp_path / "packed", "model")
    packed = open_store(tmp_path / "packed")
    assert packed.nbytes("body.0.weight") == 64 * 64 // (1 if name == "int8" else 2)
    again = load_and_quantize_model(empty(), config(name), tmp_path / "packed")
    assert torch.equal(again(IDS), out)
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state)


@needs_bnb
@pytest.mark.parametrize("packed", [False, True])
def test_8_bit_weights_run_from_the_disk_as_from_memory(
    empty: Empty, checkpoint: Path, packed: bool, tmp_path: Path
) -> None:
    settings = config("int8", torch_dtype="fp16")
    model = load_and_quantize_model(empty(), settings, checkpoint)
    expected = model(IDS)
    if packed:
        save_weights(model.state_dict(), tmp_path / "packed", "model")
        checkpoint = tmp_path / "packed"
    off = load_and_quantize_model(
        empty(),
        settings,
        checkpoint,
        device_map={"": "cpu", "body": "disk", "emb": "disk"},
        offload_folder=tmp_path / "off",
    )
    assert off.get_submodule("body.0").weight.is_meta
    for _ in range(3):
        torch.testing.assert_close(off(IDS), expected, rtol=0, atol=0)


@needs_bnb
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_model_with_values_is_quantised_as_an_empty_one_is(
    plain: nn.Module, empty: Empty, checkpoint: Path, name: str
) -> None:
    loaded = load_and_quantize_model(empty(), config(name), checkpoint)
    given = load_and_quantize_model(copy.deepcopy(plain), config(name))
    assert torch.equal(given(IDS), loaded(IDS))


@needs_bnb
def test_skipped_and_kept_modules_stay_linear_layers(empty: Empty, checkpoint: Path) -> None:
    settings = config(
        "nf4", torch_dtype="bf16", skip_modules=["body.0", "head"], keep_in_fp32_modules=["body.2"]
    )
    model = load_and_quantize_model(empty(), settings, checkpoint)
    found = {name: type(model.get_submodule(name)) for name in ("body.0", "body.2", "head")}
    assert set(found.values()) == {nn.Linear}
    assert model.get_submodule("body.0").weight.dtype == torch.bfloat16
    assert model.get_submodule("body.2").weight.dtype == torch.float32


@needs_bnb
def test_layers_that_were_exchanged_before_are_loaded_too(empty: Empty, checkpoint: Path) -> None:
    model = replace_with_bnb_layers(empty(), config("nf4"), ["head"])
    expected = load_and_quantize_model(empty(), config("nf4"), checkpoint)(IDS)
    assert torch.equal(load_and_quantize_model(model, config("nf4"), checkpoint)(IDS), expected)


@needs_bnb
@pytest.mark.parametrize(
    ("saved", "asked", "remedy"),
    [
        ("nf4", "fp4", "is nf4, not fp4: give bnb_4bit_quant_type"),
        ("nf4", "int8", "load_in_4bit=True"),
        ("int8", "nf4", "load_in_8bit=True"),
    ],
)
def test_packed_weights_of_another_kind_are_refused_with_the_way_out(
    empty: Empty, checkpoint: Path, saved: str, asked: str, remedy: str, tmp_path: Path
) -> None:
    model = load_and_quantize_model(empty(), config(saved), checkpoint)
    save_weights(model.state_dict(), tmp_path / "packed", "model")
    with pytest.raises(CheckpointMismatch, match=remedy):
        load_and_quantize_model(empty(), config(asked), tmp_path / "packed")


@needs_bnb
def test_packed_weights_of_another_size_or_layout_are_refused(
    empty: Empty, checkpoint: Path, tmp_path: Path
) -> None:
    for name, change, said in (
        ("nf4", {"body.0.weight": torch.zeros(7, 1, dtype=torch.uint8)}, "has 7 bytes.*needs 2048"),
        ("int8", {"body.0.weight_format": torch.tensor(1, dtype=torch.uint8)}, "kept by rows"),
    ):
        state = load_and_quantize_model(empty(), config(name), checkpoint).state_dict()
        save_weights({**state, **change}, tmp_path / name, "model")
        with pytest.raises(CheckpointMismatch, match=said):
            load_and_quantize_model(empty(), config(name), tmp_path / name)


@needs_bnb
def test_4_bit_weights_are_not_offloaded(empty: Empty) -> None:
    with pytest.raises(ValueError, match="load_in_8bit"):
        get_quantized_model_device_map(empty(), config("nf4"), {"": "cpu", "body": "disk"})


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("a.SCB", True),
        ("a.weight.absmax", True),
        ("a.weight.quant_state.bitsandbytes__fp4", True),
        ("a.weight", False),
        ("absmax", False),
        ("SCB", False),
    ],
)
def test_statistics_are_known_by_their_names(entry: str, found: bool) -> None:
    assert is_statistics(entry) is found


@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("kind", [ImportError, ValueError])
def test_without_bitsandbytes_the_error_names_the_extra(
    empty: Empty, name: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(kind, match=r"acc-plugins\[bnb\]"):
        load_and_quantize_model(empty(), config(name), "nowhere")
