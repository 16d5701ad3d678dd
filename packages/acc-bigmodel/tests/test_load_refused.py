"""Checkpoints that a model cannot take: refused by name before anything changes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_weights,
)
from acc_bigmodel.stores.torch_file import TorchFileStore

MAPS = [None, {"": "cpu"}, {"": "disk"}]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The block leaves the very tensors that the model had, with their values."""
    tensors = dict(model.state_dict(keep_vars=True))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    after = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        assert after[name] is tensor, name
        assert tensor.is_meta or torch.equal(tensor, before[name]), name


def float4_file(folder: Path) -> Path:
    """A file in which a tensor of a dtype that torch cannot convert is behind a good one."""
    header = json.dumps(
        {
            "0.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
            "1.weight": {"dtype": "F4", "shape": [4, 8], "data_offsets": [64, 80]},
        }
    ).encode()
    file = folder / "float4.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(80))
    return file


@pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no dtype without conversions"
)
@pytest.mark.parametrize("device_map", MAPS)
def test_a_dtype_that_torch_cannot_convert_is_named_and_nothing_changes(
    tmp_path: Path, device_map: dict | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    message = (
        r"float4\.safetensors does not fit .*'1\.weight' is torch\.float4.* cannot convert to torch\.float32"
    )
    with unchanged(model), pytest.raises(CheckpointMismatch, match=message):
        load_checkpoint_in_model(model, float4_file(tmp_path), device_map, tmp_path / "off")


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_imaginary_parts_are_not_cut_off(
    tmp_path: Path, device_map: dict | None, dtype: torch.dtype | None
) -> None:
    save_weights({"weight": torch.full((2, 2), 1 + 5j), "bias": torch.ones(2)}, tmp_path, "model")
    model = nn.Linear(2, 2)
    with unchanged(model), pytest.raises(CheckpointMismatch, match=r"'weight' is torch\.complex64 in the ch"):
        load_checkpoint_in_model(model, tmp_path, device_map, tmp_path / "off", dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_real_numbers_go_into_complex_ones_which_stay_complex(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    save_weights({"weight": torch.ones(2, 2)}, tmp_path, "model")
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=dtype)
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: torch.ones(4, 4, device="meta"), "'1.weight' in .*bin was on the meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), "is a quantized tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, about quantized tensors and their storages
def test_a_tensor_without_plain_numbers_is_named_and_nothing_changes(
    tmp_path: Path, old_format: bool, bad: Any, message: str
) -> None:
    file = tmp_path / "x.bin"
    torch.save(
        {"0.weight": torch.zeros(4, 4), "1.weight": bad()},
        file,
        _use_new_zipfile_serialization=not old_format,
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with unchanged(model), pytest.raises(ValueError, match=message):
        load_checkpoint_in_model(model, file)


class Stubborn(torch.Tensor):
    """Numbers over which nothing can be copied."""

    refuses = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and cls.refuses and isinstance(args[0], cls):
            raise NotImplementedError("this class takes no values")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_refuses_values_leaves_the_other_tensors_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(4, 4).as_subclass(Stubborn))
    state = {name: torch.rand(value.shape) for name, value in model.state_dict().items()}
    save_weights(state, tmp_path, "model")
    monkeypatch.setattr(Stubborn, "refuses", True)
    with unchanged(model), pytest.raises(NotImplementedError, match="takes no values"):
        load_checkpoint_in_model(model, tmp_path)


def test_a_tensor_whose_numbers_share_memory_is_named_and_nothing_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(1).expand(4, 4))
    save_weights({name: value + 1 for name, value in model.state_dict().items()}, tmp_path, "model")
    with unchanged(model), pytest.raises(ValueError, match=r"'1\.weight' is an expanded view"):
        load_checkpoint_in_model(model, tmp_path)


def test_a_model_that_was_made_in_inference_mode_is_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {name: torch.rand(value.shape) for name, value in model.state_dict().items()}
    save_weights(state, tmp_path, "model")
    load_checkpoint_in_model(model, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_damaged_end_of_a_zip_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    # APPNOTE.TXT, 4.3.15 and 4.3.16: a locator that speaks of two disks, before the end record
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 2)
    file.write_bytes(bytes(100) + locator + b"PK\x05\x06" + bytes(18))
    with pytest.raises(ValueError, match=r"x\.bin is a damaged zip archive"):
        TorchFileStore(file)


def test_a_checkpoint_without_a_name_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    save_weights(nn.Linear(2, 2).state_dict(), tmp_path, "model")
    monkeypatch.chdir(tmp_path)
    with unchanged(model), pytest.raises(ValueError, match=r"the checkpoint is ''.*'\.' for the working"):
        load_checkpoint_in_model(model, "")
    load_checkpoint_in_model(model, ".", strict=True)


def test_a_name_that_is_not_in_the_model_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path, "model")
    load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(2, 2)), tmp_path, {"": "cpu", "7": "disk"})
    assert caplog.text.count("The device map names '7'") == 1


@pytest.mark.parametrize("device_map", ["auto", [("", "cpu")], {0: "cpu"}])
def test_what_is_no_map_of_names_is_named(tmp_path: Path, device_map: Any) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path, "model")
    with pytest.raises(ValueError, match=r"the device map (is|has the key)"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2)), tmp_path, device_map)
    with pytest.raises(ValueError, match=r"the device map (is|has the key)"):
        dispatch_model(nn.Sequential(nn.Linear(2, 2)), device_map)
