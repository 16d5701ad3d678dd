"""Where the tensors of a model are, asked at any time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    OffloadedWeightsLoader,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    save_weights,
    weights_of,
)
from acc_hooks import attach_align_device_hook, remove_hook_from_module
from acc_ops.testing import count_calls


def test_a_plain_model_has_its_tensors_in_memory_or_nowhere(
    tied_model: nn.Module, empty_model: nn.Module
) -> None:
    weights = weights_of(tied_model)
    assert str(weights.place("norm.running_mean")) == "cpu"
    assert not weights.place("embed.weight").is_offloaded
    assert weights_of(empty_model).place("embed.weight").device == "meta"
    assert set(weights) == {*tied_model.state_dict(), "scale"}
    assert len(weights) == len(list(weights))
    assert weights.alias_of("head.weight") == "embed.weight"
    assert weights["norm.weight"] is tied_model.norm.weight


def test_shapes_dtypes_and_places_are_known_without_reading(
    tied_model: nn.Module,
    empty_model: nn.Module,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_file = load_checkpoint_and_dispatch(empty_model, checkpoint, {"": "cpu", "layers": "disk"})
    from_folder = disk_offload(tied_model, tmp_path)
    stores = [weights_of(from_file), weights_of(from_folder)]
    with monkeypatch.context() as reading:
        reading.setattr(OffloadedWeightsLoader, "__getitem__", lambda self, key: pytest.fail(f"read {key}"))
        for weights in stores:
            assert weights.shape("layers.0.up.weight") == (16, 8)
            assert weights.dtype("layers.0.up.weight") == torch.float32
            assert weights.nbytes("layers.0.up.weight") == 512
        place = stores[0].place("layers.0.up.weight")
        assert (place.device, place.is_offloaded) == ("disk", True)
        assert (place.file, place.slice) == (str(checkpoint / "model.safetensors"), "layers.0.up.weight")
        assert str(stores[0].place("embed.weight")) == "cpu"
        place = stores[1].place("head.weight")
        assert (place.device, place.file, place.slice) == ("disk", str(tmp_path / "embed.weight.dat"), None)
    assert torch.equal(stores[0]["layers.0.up.weight"], tied_model.state_dict()["layers.0.up.weight"])


def test_a_weight_that_was_replaced_is_in_memory_and_one_in_a_new_dtype_in_no_slice(
    empty_model: nn.Module, checkpoint: Path
) -> None:
    model = load_checkpoint_and_dispatch(empty_model, checkpoint, {"": "disk"})
    weights = weights_of(model)
    model.layers[0].up.weight.data = torch.ones(16, 8)
    assert str(weights.place("layers.0.up.weight")) == "cpu"
    assert weights.source("layers.1.up.weight") is not None
    model.double()
    assert weights.dtype("layers.1.up.weight") == torch.float64
    assert weights.source("layers.1.up.weight") is None


def test_every_kind_of_home_is_named(tied_model: nn.Module, tmp_path: Path) -> None:
    weights = weights_of(tied_model)
    cpu_offload(tied_model)
    assert weights.place("layers.0.up.bias").is_offloaded
    assert weights.place("layers.0.up.bias").device == "cpu"
    dispatch_model(tied_model, {"": "cpu", "head": "disk"}, offload_dir=tmp_path)
    assert str(weights.place("head.weight")) == "cpu"  # its twin is there
    assert weights.place("head.weight").is_offloaded
    remove_hook_from_module(tied_model, recurse=True)
    attach_align_device_hook(
        tied_model, execution_device="cpu", offload=True, weights_map=dict(tied_model.state_dict())
    )
    assert weights.place("head.weight").device == "cpu"
    assert weights.is_at_hand("head.weight")


def test_an_unknown_name_is_a_key_error(tied_model: nn.Module) -> None:
    weights = weights_of(tied_model)
    assert "layers.0" not in weights
    assert "nothing.there" not in weights
    assert weights.get("nothing.there") is None
    with pytest.raises(KeyError, match=r"'layers\.0' is no parameter or buffer of this TiedModel"):
        weights.place("layers.0")


def test_saving_the_weights_of_a_model_is_linear_and_keeps_its_ties(
    tied_model: nn.Module, tmp_path: Path
) -> None:
    def calls(count: int) -> int:
        model = nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])
        return count_calls(lambda: save_weights(weights_of(model), tmp_path / str(count), "model"))

    calls(10)
    assert calls(800) < 5 * calls(200)
    weights = weights_of(tied_model)
    assert weights.aliases() == {name: weights.alias_of(name) for name in weights}
