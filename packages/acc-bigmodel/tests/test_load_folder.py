"""Checkpoints that are loaded into an offload folder, one that holds something already or that others use too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    CheckpointMismatch,
    OffloadedWeightsLoader,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_weights,
)
from acc_ops.testing import run_threads
from acc_ops.world import current_world


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}, {"": "cpu", "layers.0": "disk"}])
def test_what_the_checkpoint_lacks_never_comes_from_an_offload_folder(
    tied_model: nn.Module,
    empty_model: nn.Module,
    new_model: Callable[[], nn.Module],
    tmp_path: Path,
    device_map: dict,
) -> None:
    folder = tmp_path / "off"
    disk_offload(new_model(), folder)
    state = tied_model.state_dict()
    del state["layers.1.up.weight"]
    save_weights(state, tmp_path, "model")
    before = dict(empty_model.named_parameters())
    with pytest.raises(CheckpointMismatch, match=r"'layers\.1\.up\.weight' would have no values"):
        load_checkpoint_and_dispatch(empty_model, tmp_path, device_map, offload_folder=folder)
    assert all(parameter is before[name] for name, parameter in empty_model.named_parameters())
    load_checkpoint_in_model(empty_model, tmp_path, {"": "disk"}, folder)
    with pytest.raises(RuntimeError, match=r"'layers\.1\.up\.weight' is on the meta device"):
        dispatch_model(empty_model, {"": "disk"}, offload_dir=folder)


def test_a_real_tensor_that_the_checkpoint_lacks_goes_to_the_disk(
    tied_model: nn.Module, new_model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    state = tied_model.state_dict()
    del state["layers.1.up.weight"]
    save_weights(state, tmp_path, "model")
    model = new_model()
    wanted = model.layers[1].up.weight.detach().clone()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(model.state_dict()["layers.1.up.weight"], wanted)


def test_several_ranks_convert_into_one_folder_at_once(
    tied_model: nn.Module, checkpoint: Path, tmp_path: Path, tokens: torch.Tensor
) -> None:
    models = [copy.deepcopy(tied_model).to("meta") for _ in range(4)]
    for model in models:
        model.scale = torch.tensor(2.0)

    def load() -> nn.Module:
        return load_checkpoint_and_dispatch(
            models[current_world().rank],
            checkpoint,
            {"": "disk"},
            dtype=torch.bfloat16,
            offload_folder=tmp_path / "off",
        )

    for model in run_threads(4, load):
        state = model.state_dict()
        assert all(
            torch.equal(state[name], parameter.bfloat16())
            for name, parameter in tied_model.named_parameters()
        )
    assert len(list((tmp_path / "off").glob("offloaded-*.safetensors"))) == 1
    assert len(list((tmp_path / "off").iterdir())) == 2  # the index beside it


def three_checkpoints(tmp_path: Path) -> list[Path]:
    """Of models with the same names, filled with 0, 1 and 2."""
    for number in range(3):
        values = torch.full((3, 3), float(number))
        save_weights({"0.weight": values, "1.weight": values}, tmp_path / str(number), "model")
    return [tmp_path / str(number) for number in range(3)]


def empty_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False, device="meta") for _ in range(2)))


def test_models_that_are_converted_into_one_folder_at_once_run_with_their_own_weights(tmp_path: Path) -> None:
    checkpoints, folder = three_checkpoints(tmp_path), tmp_path / "off"

    def load_and_run() -> bool:
        rank = current_world().rank
        for _ in range(8):
            model = load_checkpoint_and_dispatch(
                empty_layers(), checkpoints[rank], {"": "disk"}, dtype=torch.bfloat16, offload_folder=folder
            )
            if any(
                not torch.equal(value, torch.full_like(value, rank)) for value in model.state_dict().values()
            ):
                return False
        return True

    assert all(run_threads(3, load_and_run))


def test_a_model_whose_converted_weights_another_replaced_is_refused_before_it_runs(tmp_path: Path) -> None:
    first, second, _ = three_checkpoints(tmp_path)
    model, folder = empty_layers(), tmp_path / "off"
    report = load_checkpoint_in_model(model, first, {"": "disk"}, folder, dtype=torch.bfloat16)
    other = load_checkpoint_in_model(empty_layers(), second, {"": "disk"}, folder, dtype=torch.bfloat16)
    with pytest.raises(FileNotFoundError, match="there is no weights file"):
        dispatch_model(model, {"": "disk"}, offload_dir=folder, offload_index=report.index)
    model = dispatch_model(empty_layers().bfloat16(), {"": "disk"}, offload_index=other.index)
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_converted_weights_stay_as_long_as_the_index_names_one_of_them(tmp_path: Path) -> None:
    first, *_ = three_checkpoints(tmp_path)
    save_weights({"weight": torch.full((3, 3), 7.0)}, tmp_path / "7", "model")
    folder = tmp_path / "off"
    folder.mkdir()
    (folder / "offloaded-mine.safetensors").write_bytes(b"of somebody else")
    load_checkpoint_in_model(empty_layers(), first, {"": "disk"}, folder, dtype=torch.bfloat16)
    layer = nn.Linear(3, 3, bias=False, device="meta")
    for _ in range(2):
        load_checkpoint_in_model(layer, tmp_path / "7", {"": "disk"}, folder, dtype=torch.bfloat16)
    assert len(list(folder.glob("offloaded-*.safetensors"))) == 3
    held = OffloadedWeightsLoader(save_folder=folder)
    assert {name: value.unique().tolist() for name, value in held.items()} == {
        "0.weight": [0.0],
        "1.weight": [0.0],
        "weight": [7.0],
    }


def test_a_copy_of_a_converted_model_keeps_its_weights_when_the_folder_is_used_again(
    empty_model: nn.Module, new_model: Callable[[], nn.Module], checkpoint: Path, tmp_path: Path
) -> None:
    def load(model: nn.Module, source: Path) -> nn.Module:
        return load_checkpoint_and_dispatch(
            model, source, {"": "disk"}, dtype=torch.bfloat16, offload_folder=tmp_path / "off"
        )

    model = load(empty_model, checkpoint)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(new_model().state_dict(), tmp_path / "other", "model")
    load(new_model(), tmp_path / "other")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(value, wanted[name]) for name, value in twin.state_dict().items())
