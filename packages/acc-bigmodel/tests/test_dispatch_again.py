"""Dispatched again with another map, after a failure, in modules with two names, and whole models in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    weights_of,
)
from acc_hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    attached_hook,
    iterate_hooks,
    remove_hook_from_module,
)
from acc_hooks.ties import every_tensor
from acc_ops.fake_accelerator import FakeAccelerator

PLACES = {
    "dispatch": lambda model, folder: dispatch_model(
        model, {"": "cpu", "layers": "disk"}, offload_dir=folder
    ),
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder),
}


def test_weights_that_are_in_a_file_are_dispatched_anew_without_a_folder(
    empty_model: nn.Module, tied_model: nn.Module, checkpoint: Path, tokens: torch.Tensor
) -> None:
    wanted = tied_model(tokens)
    model = load_checkpoint_and_dispatch(empty_model, checkpoint, {"": "disk"})
    before = sorted(checkpoint.iterdir())
    dispatch_model(model, {"": "cpu", "layers": "disk"})
    assert weights_of(model).place("layers.0.up.weight").slice == "layers.0.up.weight"
    assert torch.equal(model(tokens), wanted)
    with torch.no_grad():
        model.layers[0].up.weight.data.mul_(2)  # nothing counts that
    wanted = model(tokens)
    dispatch_model(model, {"": "cpu", "layers": "disk"}, prefetch=0)
    assert str(weights_of(model).place("layers.0.up.weight")) == "cpu"  # the file has another value
    assert weights_of(model).place("layers.1.up.weight").device == "disk"
    assert torch.equal(model(tokens), wanted)
    assert sorted(checkpoint.iterdir()) == before


def test_the_folder_of_before_is_used_again(
    tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path
) -> None:
    wanted = tied_model(tokens)
    disk_offload(tied_model, tmp_path)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    dispatch_model(tied_model, {"": "cpu", "layers": "disk"})
    assert torch.equal(tied_model(tokens), wanted)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")} == written


def test_a_dispatched_model_gets_new_hooks_not_more_of_them(tied_model: nn.Module) -> None:
    dispatch_model(tied_model, {"": "cpu"}, force_hooks=True)
    once = sum(len(list(iterate_hooks(attached_hook(module)))) for module in tied_model.modules())
    dispatch_model(tied_model, {"": "cpu"}, force_hooks=True)
    assert once == sum(len(list(iterate_hooks(attached_hook(module)))) for module in tied_model.modules())
    add_hook_to_module(tied_model.norm, ModelHook(), append=True)
    dispatch_model(tied_model, {"": "cpu"}, force_hooks=True)  # nothing is offloaded: somebody's hook stays
    assert any(type(hook) is ModelHook for hook in iterate_hooks(attached_hook(tied_model.norm)))


@pytest.mark.parametrize("place", PLACES)
def test_an_attach_that_fails_leaves_the_model_as_it_was(
    tied_model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = dict(every_tensor(tied_model))
    attached: list[str] = []

    def fails_late(self: AlignDevicesHook, module: nn.Module) -> nn.Module:
        attached.append(self._path)
        if len(attached) == 6:
            raise MemoryError
        return init(self, module)

    init = AlignDevicesHook.init_hook
    monkeypatch.setattr(AlignDevicesHook, "init_hook", fails_late)
    with pytest.raises(MemoryError):
        PLACES[place](tied_model, tmp_path)
    assert all(tensor is before[name] for name, tensor in every_tensor(tied_model))
    assert not any(attached_hook(module) for module in tied_model.modules())
    assert not {"to", "cpu", "hf_device_map"} & set(vars(tied_model))


def test_a_device_that_cannot_compute_is_refused_before_anything_is_touched(
    tied_model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="sends 'layers' to 'meta', where tensors have no values"):
        dispatch_model(tied_model, {"": "cpu", "layers": "meta"})
    for main, said in (("disk", "cannot compute"), ("cuda:9", "does not have"), ("meta", "cannot compute")):
        with pytest.raises(ValueError, match=said):
            dispatch_model(tied_model, {"": "disk"}, main_device=main, offload_dir=tmp_path)
    assert not any(parameter.is_meta for parameter in tied_model.parameters())


class Twice(nn.Module):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu", "again": "disk"},
        {"first": "disk", "again": "cpu"},
        {"first.0": "cpu", "first.1": "disk", "again.0": "disk", "again.1": "cpu"},
        {"first": 0, "again": 1},
        {"first": 1, "again": "disk"},
        {"": 0, "again.1": "cpu", "first.1": "disk"},
    ],
)
def test_a_module_with_two_names_is_where_the_first_is_sent(
    device_map: dict[str, int | str], tmp_path: Path, fake: FakeAccelerator
) -> None:
    model, x = Twice().requires_grad_(False), torch.rand(2, 4)
    wanted = model(x)
    dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=True)
    assert torch.allclose(model(x).cpu(), wanted, atol=1e-6)
    assert model.first is model.again
    remove_hook_from_module(model, recurse=True)
    assert torch.allclose(model.to("cpu")(x), wanted, atol=1e-6)


def test_a_second_name_that_is_sent_elsewhere_is_said(
    caplog: pytest.LogCaptureFixture, fake: FakeAccelerator
) -> None:
    dispatch_model(Twice(), {"": "cpu", "again": "cpu"}, force_hooks=True)
    assert not caplog.records
    dispatch_model(Twice(), {"first": "cpu", "again": 0}, force_hooks=True)
    assert "'again' elsewhere than 'first', which is the same module" in caplog.text


def test_a_chain_moves_its_inputs_and_has_models_without_weights(fake: FakeAccelerator) -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), fake.device)
    bare, hook = cpu_offload_with_hook(nn.ReLU(), fake.device, hook)
    last, hook = cpu_offload_with_hook(nn.Linear(2, 2), fake.device, hook)
    for _ in range(3):
        x = torch.ones(1, 2)
        for model in (first, bare, last):
            x = model(x.to("cpu"))  # what is in memory comes along each time
            assert x.device == fake.device
        assert first.weight.device.type == "cpu"
    hook.offload()
    assert last.weight.device.type == "cpu"


@pytest.mark.parametrize("rest", ["cpu", "disk"])
@pytest.mark.parametrize("how", ["dispatched", "loaded"])
def test_a_tensor_stays_on_its_accelerator_although_others_of_its_module_come_and_go(
    tied_model: nn.Module, empty_model: nn.Module, checkpoint: Path, tmp_path: Path,
    tokens: torch.Tensor, fake: FakeAccelerator, rest: str, how: str,
) -> None:  # fmt: skip
    wanted = tied_model(tokens)
    device_map = {"": 0, "layers.0.up.weight": rest, "layers.1.up.weight": rest, "layers.1.up.bias": 1}
    if how == "loaded":
        model = load_checkpoint_and_dispatch(empty_model, checkpoint, device_map)
    else:
        model = dispatch_model(tied_model, device_map, offload_dir=tmp_path / "off")
    places = {name: weights_of(model).place(name) for name in model.state_dict()}
    assert {name: place.device for name, place in places.items()} == {
        name: device_map.get(name, 0) for name in places
    }
    assert {name for name, place in places.items() if place.is_offloaded} == device_map.keys() - {""}
    assert model.layers[0].up.bias.device == fake.device
    bias = model.layers[0].up.bias
    for _ in range(2):
        assert torch.allclose(model(tokens).cpu(), wanted)
    assert model.layers[0].up.bias is bias
    with torch.no_grad():
        for name in ("layers.0.up.bias", "layers.1.up.bias"):
            model.get_parameter(name).add_(1)
    changed = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    remove_hook_from_module(model, recurse=True)
    assert all(torch.equal(value.cpu(), changed[name]) for name, value in model.state_dict().items())
    assert torch.equal(changed["layers.0.up.bias"], bias.cpu())


def test_a_module_whose_tensors_are_on_two_accelerators_leaves_them_there(
    tied_model: nn.Module, tokens: torch.Tensor, fake: FakeAccelerator
) -> None:
    wanted = tied_model(tokens)
    before = {name: value.clone() for name, value in tied_model.state_dict().items()}
    device_map = {"": 0, "layers.0.up.weight": 1, "layers.1.up.bias": 1}
    model = dispatch_model(tied_model, device_map)
    places = {name: weights_of(model).place(name).device for name in model.state_dict()}
    assert places == {name: device_map.get(name, 0) for name in places}
    assert torch.allclose(model(tokens).cpu(), wanted)
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    remove_hook_from_module(model, recurse=True)
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
