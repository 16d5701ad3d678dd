"""Models that run where their parts are."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
    offload_state_dict,
    save_weights,
)
from acc_bigmodel import device_map as device_maps
from acc_hooks import (
    ModelHook,
    add_hook_to_module,
    align_module_device,
    attached_hook,
    iterate_hooks,
    remove_hook_from_module,
)
from acc_ops.fake_accelerator import FakeAccelerator


def test_every_form_of_one_device_is_a_plain_move(
    tied_model: nn.Module, tokens: torch.Tensor
) -> None:  # case big/12
    wanted = tied_model(tokens)
    device_map = {"embed": torch.device("cpu"), "layers": "cpu", "norm": "cpu", "head": torch.device("cpu")}
    model = dispatch_model(tied_model, device_map)
    assert model is tied_model
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(model(tokens), wanted)
    assert model.hf_device_map == device_map


def test_a_whole_model_runs_from_the_disk(
    tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path
) -> None:  # big/61
    wanted = tied_model(tokens)
    model = dispatch_model(tied_model, {"": "disk"}, offload_dir=tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(tokens), wanted)


def test_parts_on_the_cpu_are_offloaded_when_another_device_computes(
    tied_model: nn.Module, tokens: torch.Tensor, fake: FakeAccelerator
) -> None:
    wanted = tied_model(tokens)
    model = dispatch_model(tied_model, {"": "cpu", "layers.0": 0})
    assert model.layers[0].up.weight.device == fake.device
    assert model.layers[1].up.weight.is_meta
    assert not model.state_dict()["layers.1.up.weight"].is_meta
    output = model(tokens)
    assert output.device.type == "cpu"  # as the input
    assert torch.allclose(output, wanted, atol=1e-5)


def test_the_disk_needs_a_folder_or_an_index(tied_model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"give an offload_dir"):
        dispatch_model(tied_model, {"": "disk"})
    assert not any(parameter.is_meta for parameter in tied_model.parameters())


def test_a_tensor_without_a_device_is_named(tied_model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no device to 'embed\.weight'"):
        dispatch_model(tied_model, {"layers": "cpu"})


def test_an_index_is_used_as_it_is(tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path) -> None:
    wanted = tied_model(tokens)
    offload_state_dict(tmp_path, tied_model.state_dict())
    index = device_maps_index(tmp_path)
    empty = copy.deepcopy(tied_model).to("meta")
    for name, buffer in tied_model.named_buffers():
        empty.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    model = dispatch_model(empty, {"": "disk"}, offload_index=index, offload_dir=tmp_path)
    assert torch.equal(model(tokens), wanted)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(tokens), wanted)


def device_maps_index(folder: Path) -> dict:
    from acc_bigmodel.stores.disk import read_offload_index

    return read_offload_index(folder)


def test_the_check_can_be_replaced_from_outside(
    tied_model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(device_maps, "check_device_map", lambda model, device_map: seen.append(device_map))
    dispatch_model(tied_model, {"": "cpu"})
    assert seen == [{"": "cpu"}]


def test_an_offloaded_model_refuses_to_move_until_its_hooks_are_gone(
    tied_model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(tied_model, {"": "cpu", "layers": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"'layers\.0\.up\.weight' and perhaps more are offloaded"):
        model.to("cpu")
    assert "was dispatched" in caplog.text
    remove_hook_from_module(model, recurse=True)
    assert model.to(torch.float64).embed.weight.dtype == torch.float64


def test_a_dispatched_model_that_is_not_offloaded_moves_with_a_warning(
    tied_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(tied_model, {"": "cpu"}, force_hooks=True)
    assert model.to(torch.float64) is model
    assert model.embed.weight.dtype == torch.float64
    assert "was dispatched" in caplog.text


def test_a_copy_has_its_own_weights_and_moves_itself(
    tied_model: nn.Module, tokens: torch.Tensor
) -> None:  # case big/18
    model = dispatch_model(tied_model, {"": "cpu"}, force_hooks=True)
    wanted = model(tokens)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin(tokens).abs().max() == 0
        assert twin.to(torch.float64) is twin
        assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model(tokens), wanted)


def test_a_deleted_model_is_freed_at_once(tied_model: nn.Module, tmp_path: Path) -> None:  # case big/52
    models = [copy.deepcopy(tied_model) for _ in range(2)]
    dispatched = [
        dispatch_model(models[0], {"": "cpu"}, force_hooks=True),
        dispatch_model(models[1], {"": "cpu", "layers": "disk"}, offload_dir=tmp_path),
    ]
    references = [weakref.ref(model.embed.weight) for model in dispatched]
    gc.disable()
    try:
        models.clear()
        dispatched.clear()
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_cpu_offload_keeps_values_ties_and_state_dict(tied_model: nn.Module, tokens: torch.Tensor) -> None:
    wanted = tied_model(tokens)
    state = {name: value.clone() for name, value in tied_model.state_dict().items()}
    model = cpu_offload(tied_model, execution_device=torch.device("cpu"))
    assert model.embed.weight.is_meta
    assert torch.equal(model(tokens), wanted)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    remove_hook_from_module(model, recurse=True)
    assert model.embed.weight is model.head.weight
    assert torch.equal(model(tokens), wanted)


def test_a_model_whose_root_owns_the_weights_can_be_offloaded() -> None:  # case big/24
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with align_module_device(model, torch.device("cpu")):
        assert torch.equal(model.weight, weight)


def test_cpu_offload_with_hook_leaves_the_device_when_told() -> None:
    model, hook = cpu_offload_with_hook(nn.Linear(4, 4), execution_device="meta")
    assert model.weight.device.type == "cpu"
    for _ in range(2):
        assert model(torch.ones(1, 4)).is_meta
    second, _ = cpu_offload_with_hook(nn.ReLU(), execution_device="cpu", prev_module_hook=None)
    assert second(torch.ones(1)).tolist() == [1]
    hook.remove()
    assert not hasattr(model, "_hf_hook")


def test_disk_offload_never_runs_with_another_models_weights(tmp_path: Path) -> None:  # case big/27
    x = torch.randn(2, 4)
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    wanted = [first(x), second(x)]
    disk_offload(first, tmp_path, execution_device=torch.device("cpu"))
    disk_offload(second, tmp_path, execution_device=torch.device("cpu"))
    assert torch.equal(second(x), wanted[1])
    assert torch.equal(first(x), wanted[0])


def test_disk_offload_takes_back_an_offloaded_folder(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4))
    wanted = model(x)
    offload_state_dict(tmp_path, model.state_dict())
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    disk_offload(model, tmp_path)
    assert torch.equal(model(x), wanted)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")} == written


def test_a_change_made_while_a_weight_is_loaded_is_kept(tmp_path: Path) -> None:  # case big/51
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    before = model(x)
    with align_module_device(model[0]), torch.no_grad():
        model[0].weight.add_(1.0)
    wanted = before + x.sum(1, keepdim=True)
    assert torch.allclose(model(x), wanted, atol=1e-5)


def test_a_model_is_dispatched_again_with_another_map(
    tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path
) -> None:
    wanted = tied_model(tokens)
    model = tied_model
    for number, device_map in enumerate(({"": "disk"}, {"": "cpu", "layers": "disk"}, {"": "cpu"})):
        model = dispatch_model(model, device_map, offload_dir=tmp_path / str(number), force_hooks=True)
        assert torch.equal(model(tokens), wanted)
        remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(tokens), wanted)


def test_a_planned_model_runs(tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path) -> None:
    wanted = tied_model(tokens)
    for budget in range(600, 5000, 400):
        model = copy.deepcopy(tied_model)
        device_map = infer_auto_device_map(model, {"cpu": budget}, "Block")
        dispatch_model(model, device_map, offload_dir=tmp_path / str(budget))
        assert torch.equal(model(tokens), wanted)


@pytest.mark.parametrize("how", ["disk_offload", "dispatch_model"])
def test_a_tie_is_one_file_and_one_weight(tied_model: nn.Module, tmp_path: Path, how: str) -> None:
    wanted = tied_model.embed.weight.detach() * 2
    if how == "disk_offload":
        disk_offload(tied_model, tmp_path)
    else:
        dispatch_model(tied_model, {"": "disk"}, offload_dir=tmp_path)
    assert not (tmp_path / "head.weight.dat").exists()
    with align_module_device(tied_model.head), torch.no_grad():
        tied_model.head.weight.mul_(2)
    for model in (tied_model, copy.deepcopy(tied_model), pickle.loads(pickle.dumps(tied_model))):
        state = model.state_dict()
        assert torch.equal(state["embed.weight"], wanted)
        assert torch.equal(state["head.weight"], wanted)
    remove_hook_from_module(tied_model, recurse=True)
    assert torch.equal(tied_model.embed.weight, wanted)


def test_a_copy_of_an_offloaded_model_has_what_was_loaded_into_it(
    tied_model: nn.Module, new_model: Callable[[], nn.Module], tokens: torch.Tensor, tmp_path: Path
) -> None:
    disk_offload(tied_model, tmp_path)
    other = new_model()
    tied_model.load_state_dict(other.state_dict())
    for twin in (copy.deepcopy(tied_model), pickle.loads(pickle.dumps(tied_model))):
        assert torch.equal(twin(tokens), other(tokens))


def test_a_copy_never_runs_with_another_models_weights(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    wanted = first(x)
    disk_offload(first, tmp_path)
    text = pickle.dumps(first)
    disk_offload(second, tmp_path)
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(twin(x), wanted)
    with pytest.raises(RuntimeError, match=r"0\.weight\.dat was replaced"):
        pickle.loads(text)(x)


def test_a_relative_offload_folder_survives_a_change_of_directory(
    tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tied_model(tokens)
    monkeypatch.chdir(tmp_path)
    disk_offload(tied_model, "off")
    monkeypatch.chdir("/")
    for model in (tied_model, copy.deepcopy(tied_model), pickle.loads(pickle.dumps(tied_model))):
        assert torch.equal(model(tokens), wanted)


def offload(model: nn.Module, how: str, folder: Path) -> nn.Module:
    if how == "cpu":
        return cpu_offload(model, execution_device="cpu")
    if how == "disk":
        return disk_offload(model, folder)
    return dispatch_model(model, {"": "cpu", "layers": "disk"}, offload_dir=folder)


@pytest.mark.parametrize("first", ["cpu", "disk", "dispatch"])
@pytest.mark.parametrize("second", ["cpu", "disk", "dispatch"])
def test_an_offloaded_model_is_offloaded_anew(
    tied_model: nn.Module, tokens: torch.Tensor, tmp_path: Path, first: str, second: str
) -> None:
    offload(tied_model, first, tmp_path)
    with align_module_device(tied_model.layers[0].up), torch.no_grad():
        tied_model.layers[0].up.weight.add_(1)
    wanted = tied_model(tokens)
    offload(tied_model, second, tmp_path)
    assert torch.equal(tied_model(tokens), wanted)
    remove_hook_from_module(tied_model, recurse=True)
    assert torch.equal(tied_model(tokens), wanted)
    assert tied_model.embed.weight is tied_model.head.weight


def test_offloading_anew_never_drops_a_hook_of_somebody_else(tied_model: nn.Module, tmp_path: Path) -> None:
    cpu_offload(tied_model, execution_device="cpu")
    add_hook_to_module(tied_model.norm, ModelHook(), append=True)
    with pytest.raises(RuntimeError, match="would remove the ModelHook of 'norm'"):
        disk_offload(tied_model, tmp_path)
    assert tied_model.norm.weight.is_meta


@pytest.mark.parametrize("how", ["cpu", "disk", "dispatch"])
def test_no_way_to_move_an_offloaded_model_is_taken(tied_model: nn.Module, tmp_path: Path, how: str) -> None:
    model = offload(tied_model, how, tmp_path)
    for move in (
        lambda: model.to("cpu"),
        lambda: model.to(device="cpu"),
        lambda: model.to(torch.ones(1)),
        lambda: model.cpu(),
        lambda: model.to_empty(device="cpu"),
    ):
        with pytest.raises(RuntimeError, match="and perhaps more are offloaded"):
            move()
    remove_hook_from_module(model, recurse=True)
    assert model.cpu() is model
    assert "cpu" not in model.__dict__
    assert model.to("cpu").embed.weight.device.type == "cpu"


def test_an_offloaded_model_changes_its_dtype(tied_model: nn.Module, tokens: torch.Tensor) -> None:
    wanted = copy.deepcopy(tied_model).double()(tokens)
    model = cpu_offload(tied_model, execution_device="cpu")
    assert model.to(torch.float64) is model
    assert torch.equal(model(tokens), wanted)


def test_values_that_are_missing_and_devices_that_are_not_there_are_named(tied_model: nn.Module) -> None:
    with pytest.raises(ValueError, match="'the whole model' to 'cuda:99', but this machine has"):
        dispatch_model(tied_model, {"": "cuda:99"})
    tied_model.norm.to("meta")
    for place in (lambda: dispatch_model(tied_model, {"": "cpu"}), lambda: cpu_offload(tied_model)):
        with pytest.raises(ValueError, match=r"'norm\.weight' is on the meta device and has no values"):
            place()


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 1}])
def test_how_many_layers_are_fetched_ahead_is_said_to_the_hooks_and_mapped_weights_need_no_thread(
    new_model: Callable[[], nn.Module], tokens: torch.Tensor, tmp_path: Path, options: dict[str, int]
) -> None:
    save_weights(new_model().state_dict(), tmp_path / "checkpoint", "model")
    for place in (
        lambda model: dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "a", **options),
        lambda model: disk_offload(model, tmp_path / "b", **options),
        lambda model: cpu_offload(model, **options),
        lambda model: load_checkpoint_and_dispatch(
            model, tmp_path / "checkpoint", {"": "disk"}, offload_folder=tmp_path / "c", **options
        ),
    ):
        model = place(new_model())
        model(tokens)
        (hook,) = [hook for hook in iterate_hooks(attached_hook(model.layers[1].up)) if hook.offload]
        assert hook._prefetcher._layers_ahead == options.get("prefetch", 2)
        assert hook._prefetcher._thread is None


def test_the_method_of_a_new_kind_of_device_is_guarded_too(
    tied_model: nn.Module, monkeypatch: pytest.MonkeyPatch, fake: FakeAccelerator
) -> None:
    monkeypatch.setattr(nn.Module, fake.kind, lambda self: self.to(fake.device), raising=False)
    cpu_offload(tied_model, fake.device)
    with pytest.raises(RuntimeError, match="cannot be moved"):
        getattr(tied_model, fake.kind)()
    remove_hook_from_module(tied_model, recurse=True)
    assert getattr(tied_model, fake.kind)().embed.weight.device == fake.device
    tied_model.to("cpu")
    assert not {"to", fake.kind} & set(vars(tied_model))
