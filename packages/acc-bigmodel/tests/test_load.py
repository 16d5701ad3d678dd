"""Checkpoints into models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
    load_weights,
    open_store,
    save_weights,
)
from acc_bigmodel.stores.disk import read_offload_index
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_hooks import remove_hook_from_module
from acc_ops.testing import count_calls


def equal(model: nn.Module, other: nn.Module) -> bool:
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("as_text", [True, False])
def test_an_empty_model_is_filled_with_mapped_weights(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, device_map: dict | None, as_text: bool
) -> None:  # cases big/47 and 48
    report = load_checkpoint_in_model(empty_model, str(checkpoint) if as_text else checkpoint, device_map)
    assert equal(empty_model, tied_model)
    assert empty_model.embed.weight is empty_model.head.weight
    assert set(report.loaded) == set(tied_model.state_dict())
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())


def test_loading_takes_no_memory_of_its_own(tmp_path: Path, anonymous_bytes: Callable[[], int]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(6)])

    save_weights(build().state_dict(), tmp_path, "model")
    with init_empty_weights():
        model = build()
    before = anonymous_bytes()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    model(torch.ones(1, 1000))
    assert anonymous_bytes() - before < 8_000_000  # of 24 MB


def test_a_real_model_keeps_its_parameters(
    tied_model: nn.Module, new_model: Callable[[], nn.Module], checkpoint: Path
) -> None:
    other = new_model()
    before = dict(other.named_parameters())
    load_checkpoint_in_model(other, checkpoint)
    assert equal(other, tied_model)
    assert all(parameter is before[name] for name, parameter in other.named_parameters())


@pytest.mark.parametrize("safe", [True, False])
def test_shards_load_strictly(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path, safe: bool
) -> None:  # case big/45
    save_weights(tied_model.state_dict(), tmp_path, "model", "0.3KB", safe)
    load_checkpoint_in_model(empty_model, tmp_path, strict=True)
    assert equal(empty_model, tied_model)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_missing_and_unexpected_names_are_reported_or_refused(
    tied_model: nn.Module,
    empty_model: nn.Module,
    tmp_path: Path,
    device_map: dict | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # case big/44
    state = tied_model.state_dict()
    state["layers.1.upp.bias"] = state.pop("layers.1.up.bias")
    save_weights(state, tmp_path, "model")
    before = dict(empty_model.named_parameters())
    with pytest.raises(
        CheckpointMismatch, match=r"lacks 'layers\.1\.up\.bias' \(is 'layers\.1\.upp\.bias' meant\?\)"
    ):
        load_checkpoint_in_model(empty_model, tmp_path, device_map, strict=True)
    assert all(parameter is before[name] for name, parameter in empty_model.named_parameters())
    report = load_checkpoint_in_model(empty_model, tmp_path, device_map)
    assert (report.missing, report.unexpected) == (("layers.1.up.bias",), ("layers.1.upp.bias",))
    assert "the model has no 'layers.1.upp.bias'" in caplog.text


def test_one_name_of_a_tie_is_enough(tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path) -> None:
    state = tied_model.state_dict()
    del state["embed.weight"]
    save_weights(state, tmp_path, "model")
    report = load_checkpoint_in_model(empty_model, tmp_path, {"": "cpu"}, strict=True)
    assert report.tied == ("embed.weight",)
    assert equal(empty_model, tied_model)
    assert empty_model.embed.weight is empty_model.head.weight


def test_shapes_that_differ_are_named_and_nothing_is_loaded(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path
) -> None:
    state = tied_model.state_dict()
    state["norm.weight"] = torch.ones(9)
    save_weights(state, tmp_path, "model")
    with pytest.raises(
        ValueError, match=r"'norm\.weight' has the shape \(9,\) in the checkpoint and \(8,\) in the model"
    ):
        load_checkpoint_in_model(empty_model, tmp_path, {"": "cpu"})
    assert all(parameter.is_meta for parameter in empty_model.parameters())


def test_floats_do_not_go_into_integers(tied_model: nn.Module, tmp_path: Path) -> None:
    state = tied_model.state_dict()
    state["norm.num_batches_tracked"] = torch.tensor(1.5)
    save_weights(state, tmp_path, "model")
    with pytest.raises(ValueError, match=r"torch\.float32 in the checkpoint and torch\.int64"):
        load_checkpoint_in_model(tied_model, tmp_path)


def test_a_dtype_converts_floats_only(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path
) -> None:
    report = load_checkpoint_in_model(
        empty_model, checkpoint, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm", "layer"]
    )
    dtypes = {name: value.dtype for name, value in empty_model.state_dict().items()}
    assert dtypes["layers.0.up.weight"] == torch.float16
    assert dtypes["norm.weight"] == torch.float32
    assert dtypes["norm.num_batches_tracked"] == torch.int64
    assert "layers.0.up.weight" in report.cast
    assert "norm.weight" not in report.cast
    assert torch.equal(empty_model.embed.weight, tied_model.embed.weight.half())


def test_without_a_dtype_the_models_own_holds(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path
) -> None:
    empty_model.to(torch.bfloat16)
    load_checkpoint_in_model(empty_model, checkpoint, {"": "cpu"})
    assert empty_model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(empty_model.head.weight, tied_model.head.weight.bfloat16())


def test_persistent_buffers_always_come_from_the_checkpoint(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, tmp_path: Path
) -> None:
    load_checkpoint_in_model(empty_model, checkpoint, {"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(empty_model.norm.running_mean, tied_model.norm.running_mean)
    assert empty_model.norm.weight.is_meta


def test_for_the_disk_a_slice_of_the_right_dtype_is_used_in_place(
    empty_model: nn.Module, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "off"
    report = load_checkpoint_in_model(empty_model, checkpoint, {"": "disk"}, offload_folder=folder)
    assert report.written_bytes == 0
    assert [file.name for file in folder.iterdir()] == ["index.json"]
    entry = read_offload_index(folder)["layers.0.up.weight"]
    assert entry == {
        "safetensors_file": str(checkpoint / "model.safetensors"),
        "weight_name": "layers.0.up.weight",
        "dtype": "float32",
    }


@pytest.mark.parametrize(("safe", "dtype"), [(True, torch.bfloat16), (False, None)])
def test_for_the_disk_only_what_must_change_is_written(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path, safe: bool, dtype: torch.dtype | None
) -> None:
    save_weights(tied_model.state_dict(), tmp_path, "model", safe=safe)
    folder = tmp_path / "off"
    device_map = {"": "disk", "layers.0": "cpu"}
    report = load_checkpoint_in_model(empty_model, tmp_path, device_map, folder, dtype=dtype)
    (file,) = folder.glob("*.safetensors")
    store = open_store(file)
    assert set(store) == {n for n, p in tied_model.named_parameters() if not n.startswith("layers.0")}
    assert all(store.dtype(name) == (dtype or torch.float32) for name in store)
    assert report.written_bytes == file.stat().st_size
    assert set(report.index) == {*store, "head.weight"}
    assert empty_model.layers[1].up.weight.dtype == (dtype or torch.float32)


def test_the_disk_needs_a_folder_and_every_tensor_a_device(empty_model: nn.Module, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="give an offload_folder"):
        load_checkpoint_in_model(empty_model, checkpoint, {"": "disk"})
    with pytest.raises(ValueError, match=r"no device to 'embed\.weight'"):
        load_checkpoint_in_model(empty_model, checkpoint, {"layers": "cpu", "norm": "cpu", "head": "cpu"})


@pytest.mark.parametrize("kind", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_automatic_maps_run_on_any_machine(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, tokens: torch.Tensor, kind: str
) -> None:  # case big/71
    model = load_checkpoint_and_dispatch(empty_model, checkpoint, device_map=kind)
    assert torch.allclose(model(tokens).to("cpu"), tied_model(tokens))
    with pytest.raises(ValueError, match="must be a mapping or one of auto"):
        load_checkpoint_and_dispatch(model, checkpoint, device_map="best")


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        {"": "disk"},
        {"embed": "cpu", "head": "disk", "layers": "disk", "norm": "cpu"},
        {"": "cpu", "layers.1": "disk", "layers.2.up": "disk"},
        {"": "disk", "layers.1": "cpu"},
        {"": "cpu", "layers.0.up.weight": "disk", "norm.bias": "disk"},
    ],
)
def test_every_placement_computes_the_same_and_can_be_undone(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, tokens: torch.Tensor, device_map: dict
) -> None:  # cases big/25 and 28
    wanted = tied_model(tokens)
    model = load_checkpoint_and_dispatch(empty_model, checkpoint, device_map=device_map)
    for _ in range(2):
        assert torch.equal(model(tokens), wanted)
    assert equal(model, tied_model)
    assert model.hf_device_map == device_map
    remove_hook_from_module(model, recurse=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(tokens), wanted)
    assert model.embed.weight is model.head.weight


def test_a_converted_offload_computes_in_its_dtype(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    model = load_checkpoint_and_dispatch(
        empty_model, checkpoint, {"": "disk"}, dtype=torch.float64, offload_folder=tmp_path / "off"
    )
    model.norm.to(torch.float64)
    out = model(tokens)
    assert out.dtype == torch.float64
    assert torch.allclose(out, tied_model.double()(tokens))


def test_what_must_be_written_needs_a_folder_there_too(empty_model: nn.Module, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="give an offload_folder"):
        load_checkpoint_and_dispatch(empty_model, checkpoint, {"": "disk"}, dtype=torch.float16)
    assert all(parameter.dtype == torch.float32 for parameter in empty_model.parameters())


def test_layers_for_the_disk_do_not_pass_through_memory(
    tmp_path: Path, anonymous_bytes: Callable[[], int]
) -> None:  # case big/74
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(8)])

    save_weights(build().state_dict(), tmp_path, "model")
    with init_empty_weights():
        model = build()
    before = anonymous_bytes()
    model = load_checkpoint_and_dispatch(
        model, tmp_path, {"0": "cpu", **{str(i): "disk" for i in range(1, 8)}}
    )
    with torch.no_grad():
        model(torch.ones(1, 1000))
    assert anonymous_bytes() - before < 8_000_000  # of 32 MB


@pytest.mark.parametrize("safe", [True, False])
def test_a_file_becomes_a_state_dict(tied_model: nn.Module, tmp_path: Path, safe: bool) -> None:
    file = tmp_path / save_weights(tied_model.state_dict(), tmp_path, "model", safe=safe)[0]
    state = load_state_dict(file)
    assert all(torch.equal(state[name], value) for name, value in tied_model.state_dict().items())


def test_a_state_dict_goes_to_its_devices(tmp_path: Path) -> None:
    file = (
        tmp_path
        / save_weights({"a.w": torch.ones(1), "b.w": torch.ones(1), "c": torch.ones(1)}, tmp_path, "m")[0]
    )
    state = load_state_dict(file, device_map={"a": "meta", "b": "disk"})
    assert {name: value.device.type for name, value in state.items()} == {
        "a.w": "meta",
        "b.w": "cpu",
        "c": "cpu",
    }


def test_the_framework_of_a_file_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "x.safetensors"
    for written_for, error in (("tf", ValueError), ("numpy", OSError)):
        write_safetensors(file, {"w": Entry.of(torch.ones(1))}, {"format": written_for})
        with pytest.raises(error, match=written_for):
            load_state_dict(file)
    content = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    file.write_bytes(len(content).to_bytes(8, "little") + content + b"\x07")
    assert load_state_dict(file)["w"].tolist() == [7]
    assert "does not say for which framework" in caplog.text


def test_reading_many_tensors_is_linear(tmp_path: Path) -> None:  # case big/62
    def calls(count: int) -> int:
        file = tmp_path / "m.safetensors"
        write_safetensors(file, {f"layers.{i}.w": Entry.of(torch.zeros(1)) for i in range(count)})
        device_map = {f"layers.{i}": ("disk" if i % 2 else "cpu") for i in range(count)}
        return count_calls(lambda: load_state_dict(file, device_map))

    assert calls(2000) < 5 * calls(500)


@pytest.mark.parametrize("how", ["in model", "state dict", "weights", "store"])
def test_weights_of_a_torch_file_stay_when_it_is_written_over(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path, how: str
) -> None:
    file = tmp_path / save_weights(tied_model.state_dict(), tmp_path, "model", safe=False)[0]
    if how == "in model":
        load_checkpoint_in_model(empty_model, file)
        state = empty_model.state_dict()
    elif how == "state dict":
        state = load_state_dict(file)
    else:
        state = load_weights(tmp_path, "model") if how == "weights" else dict(open_store(file))
    with file.open("r+b") as out:  # in place, as torch.save does
        out.write(bytes(file.stat().st_size))
    assert all(torch.equal(state[name], value) for name, value in tied_model.state_dict().items())
    if how != "store":
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_different_values_for_tied_names_are_reported_or_refused(
    tied_model: nn.Module, empty_model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = {name: value.clone() for name, value in tied_model.state_dict().items()}
    save_weights(same, tmp_path / "same", "model")
    assert load_checkpoint_in_model(empty_model, tmp_path / "same", strict=True).conflicting == ()
    save_weights({**same, "head.weight": same["head.weight"] + 1}, tmp_path / "other", "model")
    with pytest.raises(CheckpointMismatch, match=r"ties 'head\.weight' to another name whose value differs"):
        load_checkpoint_in_model(empty_model, tmp_path / "other", strict=True)
    assert load_checkpoint_in_model(empty_model, tmp_path / "other").conflicting == ("head.weight",)
    assert torch.equal(empty_model.head.weight, tied_model.embed.weight)
    assert "'head.weight'" in caplog.text


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "int64"])
def test_weights_are_never_cut_to_whole_numbers(
    empty_model: nn.Module, checkpoint: Path, dtype: torch.dtype | str
) -> None:
    with pytest.raises(ValueError, match="would cut the fractions off"):
        load_checkpoint_in_model(empty_model, checkpoint, dtype=dtype)
    assert all(parameter.is_meta for parameter in empty_model.parameters())


def test_a_device_that_is_not_there_is_named_before_loading(empty_model: nn.Module, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="'layers' to 'cuda:99', but this machine has"):
        load_checkpoint_and_dispatch(empty_model, checkpoint, {"": "cpu", "layers": "cuda:99"})
    assert all(parameter.is_meta for parameter in empty_model.parameters())


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_budgets_beside_a_given_map_are_said_to_have_no_effect(
    empty_model: nn.Module, checkpoint: Path, device_map: dict | None, caplog: pytest.LogCaptureFixture
) -> None:
    load_checkpoint_and_dispatch(empty_model, checkpoint, device_map=device_map, max_memory={"cpu": "1GB"})
    assert "max_memory has no effect without a device_map to be made" in caplog.text
