"""quantization/load.py: what is loaded, quantised and placed, whatever the format; bitsandbytes' and torchao's bits are in their own tests."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import CheckpointMismatch, save_weights
from acc_plugins.quantization.load import load_and_quantize_model

Empty = Callable[[], nn.Module]
IDS = torch.arange(8)


def expected_of(plain: nn.Module, names: tuple[str, ...] = ("body.0", "body.2")) -> torch.Tensor:
    for name in names:
        layer: Any = plain.get_submodule(name)
        layer.weight.data = layer.weight.data.half().float()
    out: torch.Tensor = plain(IDS)
    return out


@pytest.mark.parametrize("place", [None, "auto", {"": "cpu"}, {"": "cpu", "body.0": "disk", "emb": "disk"}])
def test_an_empty_model_is_loaded_and_quantised_wherever_it_goes(
    plain: nn.Module, empty: Empty, checkpoint: Path, halved: Any, place: Any, tmp_path: Path
) -> None:
    kind = halved()
    model = load_and_quantize_model(
        empty(), kind, checkpoint, device_map=place, offload_folder=tmp_path / "off"
    )
    assert kind.calls == ["body.0.weight", "body.2.weight"]
    for _ in range(2):
        torch.testing.assert_close(model(IDS), expected_of(plain), rtol=0, atol=0)


@pytest.mark.parametrize("place", [None, {"": "cpu", "body.0": "disk"}])
def test_a_model_with_values_is_quantised_where_it_goes_and_told_of_the_better_way(
    plain: nn.Module, halved: Any, place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load_and_quantize_model(plain, halved(), device_map=place, offload_folder=tmp_path)
    assert model is plain
    assert "init_empty_weights" in caplog.text
    assert model(IDS).isfinite().all()


def test_a_checkpoint_goes_before_the_values_that_a_model_has(
    plain: nn.Module, checkpoint: Path, halved: Any
) -> None:
    expected = expected_of(copy.deepcopy(plain))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    model = load_and_quantize_model(plain, halved(), checkpoint)
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=0)


def test_the_rest_takes_its_dtype_and_what_is_kept_stays_float32_and_whole(
    empty: Empty, checkpoint: Path, halved: Any
) -> None:
    kind = halved(rest_dtype=torch.bfloat16, keep_in_fp32=["body.2"], skip_modules=[])
    model = load_and_quantize_model(empty(), kind, checkpoint)
    assert kind.calls == ["body.0.weight", "head.weight"]
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes["body.2.weight"] == torch.float32
    assert {dtypes[name] for name in ("emb.weight", "body.0.bias", "body.3.weight", "head.bias")} == {
        torch.bfloat16
    }
    assert model.scale.dtype == torch.float32  # no state dict holds it


def test_names_to_leave_out_that_mean_nothing_are_told_once(
    empty: Empty, checkpoint: Path, halved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load_and_quantize_model(
        empty(), halved(skip_modules=["body.2", "bod"], keep_in_fp32=["norm"]), checkpoint
    )
    told = [record.getMessage() for record in caplog.records if "names nothing of" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("'bod', 'norm' of skip_modules and keep_in_fp32_modules")
    caplog.clear()
    load_and_quantize_model(empty(), halved(skip_modules=["body.2"], keep_in_fp32=["head.bias"]), checkpoint)
    assert "names nothing of" not in caplog.text


def test_ties_stay_ties(halved: Any, tmp_path: Path) -> None:
    def built() -> nn.Module:
        model = nn.ModuleDict({"emb": nn.Embedding(8, 4), "up": nn.Linear(4, 4), "head": nn.Linear(4, 8)})
        model["head"].weight = model["emb"].weight
        return model

    save_weights(built().state_dict(), tmp_path, "model")
    with torch.device("meta"):
        model = built()
    load_and_quantize_model(model, halved(rest_dtype=torch.bfloat16), tmp_path)
    assert model.get_submodule("head").weight is model.get_submodule("emb").weight
    assert model.get_submodule("up").weight.requires_grad is False


@pytest.mark.parametrize("order", [("emb", "up", "head"), ("head", "up", "emb")])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_tied_layer_that_is_quantised_all_the_same_leaves_the_other_its_values(
    halved: Any, order: tuple[str, ...], is_empty: bool, tmp_path: Path
) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        parts = {"emb": nn.Embedding(8, 4), "up": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
        parts["head"].weight = parts["emb"].weight
        return nn.ModuleDict({name: parts[name] for name in order})

    own = built()
    weight = own.get_submodule("emb").weight
    assert isinstance(weight, torch.Tensor)
    save_weights(own.state_dict(), tmp_path, "model")
    with torch.device("meta" if is_empty else "cpu"):
        model = built()
    kind = halved(skip_modules=[])
    load_and_quantize_model(model, kind, tmp_path if is_empty else None)
    assert sorted(kind.calls) == ["head.weight", "up.weight"]
    state = model.state_dict()
    assert torch.equal(state["emb.weight"], weight)
    assert torch.equal(state["head.weight"], weight.half().float())


def test_a_layer_of_two_names_is_quantised_once(halved: Any, tmp_path: Path) -> None:
    def built() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 4))

    save_weights(built().state_dict(), tmp_path, "model")
    with torch.device("meta"):
        model = built()
    kind = halved(skip_modules=["3"])
    load_and_quantize_model(model, kind, tmp_path)
    assert kind.calls == ["0.weight"]
    assert model(torch.ones(1, 4)).isfinite().all()


def test_an_empty_model_without_a_checkpoint_is_refused(empty: Empty, halved: Any) -> None:
    with pytest.raises(RuntimeError, match="weights_location"):
        load_and_quantize_model(empty(), halved())


def test_weights_for_the_disk_need_a_folder(empty: Empty, checkpoint: Path, halved: Any) -> None:
    with pytest.raises(ValueError, match=r"'body\.0\.weight': give an offload_folder"):
        load_and_quantize_model(empty(), halved(), checkpoint, device_map={"": "cpu", "body.0": "disk"})


def test_a_checkpoint_that_does_not_fit_names_every_weight(
    plain: nn.Module, empty: Empty, halved: Any, tmp_path: Path
) -> None:
    state = {**plain.state_dict(), "body.0.weight": torch.zeros(2, 2)}
    del state["body.2.weight"]
    save_weights(state, tmp_path, "model")
    with pytest.raises(CheckpointMismatch, match=r"body\.0\.weight.*\(2, 2\)"):
        load_and_quantize_model(empty(), halved(), tmp_path)
    state["body.0.weight"] = torch.zeros(64, 64)
    save_weights(state, tmp_path, "model")
    with pytest.raises(CheckpointMismatch, match=r"lacks 'body\.2\.weight'"):
        load_and_quantize_model(empty(), halved(), tmp_path)


def test_what_the_rest_lacks_is_refused_and_what_is_too_much_is_said(
    plain: nn.Module, empty: Empty, halved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = dict(plain.state_dict())
    save_weights({**state, "extra": torch.ones(1)}, tmp_path, "model")
    with caplog.at_level(logging.WARNING):
        load_and_quantize_model(empty(), halved(), tmp_path)
    assert "the model has no 'extra'" in caplog.text
    del state["emb.weight"]
    save_weights(state, tmp_path, "model")
    with pytest.raises(CheckpointMismatch, match=r"emb\.weight"):
        load_and_quantize_model(empty(), halved(), tmp_path)


def test_packed_weights_of_a_layer_that_is_left_out_are_refused(
    plain: nn.Module, empty: Empty, halved: Any, tmp_path: Path
) -> None:
    state = {**plain.state_dict(), "head.weight": torch.ones(8, 64, dtype=torch.int8)}
    save_weights({**state, "head.SCB": torch.ones(8)}, tmp_path, "model")
    with pytest.raises(CheckpointMismatch, match=r"'head\.SCB'.*skip_modules"):
        load_and_quantize_model(empty(), halved(), tmp_path)


@pytest.mark.parametrize("config", [3, None, object()])
def test_what_is_no_configuration_is_refused(empty: Empty, config: Any) -> None:
    with pytest.raises((TypeError, ImportError), match=r"BnbQuantizationConfig|torchao"):
        load_and_quantize_model(empty(), config)
