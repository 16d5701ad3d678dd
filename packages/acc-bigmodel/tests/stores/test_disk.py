"""Offloaded weights and their index."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from acc_bigmodel import OffloadedWeightsLoader, offload_state_dict
from acc_bigmodel.offload import offload_or_reuse
from acc_bigmodel.stores.safetensors import Entry, write_safetensors
from acc_bigmodel.stores.store import ReplacedFileError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    offload_state_dict(tmp_path / "off", {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)})
    return tmp_path / "off"


def test_nothing_to_load_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="give a state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()


def test_memory_goes_before_the_disk_and_attributes_are_there(folder: Path) -> None:
    mine = torch.zeros(4)
    loader = OffloadedWeightsLoader({"a": mine, "c": mine}, folder)
    assert loader["a"] is mine
    assert loader.all_keys == ["a", "c", "b"]
    assert loader.save_folder == folder
    assert loader.index["b"] == {"dtype": "bfloat16", "shape": [2]}
    assert (len(loader), list(loader), "b" in loader, "z" in loader) == (3, ["a", "c", "b"], True, False)
    assert loader.device is None


def test_layouts_are_known_without_reading(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    for file in folder.glob("*.dat"):
        file.unlink()
    assert (loader.shape("a"), loader.dtype("b"), loader.nbytes("a")) == ((4,), torch.bfloat16, 16)


def test_entries_may_point_into_safetensors_files(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    write_safetensors(file, {"x": Entry.of(torch.arange(3.0))})
    index = {
        "a": {"safetensors_file": str(file), "weight_name": "x", "dtype": "float32"},
        "x": {"safetensors_file": str(file)},
        "half": {"safetensors_file": str(file), "weight_name": "x", "dtype": "float16"},
    }
    loader = OffloadedWeightsLoader(index=index)
    assert torch.equal(loader["a"], loader["x"])
    assert loader["half"].dtype == torch.float16
    assert loader.shape("half") == (3,)
    source = loader.source("a")
    assert source is not None
    assert (source.file, source.name) == (str(file), "x")
    assert loader.source("half") is None


def test_relative_files_are_sought_beside_the_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "w.safetensors", {"x": Entry.of(torch.arange(3.0))})
    loader = OffloadedWeightsLoader(save_folder=tmp_path, index={"x": {"safetensors_file": "w.safetensors"}})
    assert torch.equal(loader["x"], torch.arange(3.0))


def test_a_change_made_in_place_is_kept_but_never_reaches_the_file(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader["a"].add_(1)
    assert loader["a"][0] == 1
    assert OffloadedWeightsLoader(save_folder=folder)["a"][0] == 0


def test_another_value_is_kept_in_memory(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader["a"] = torch.full((4,), 9.0)
    loader["new"] = torch.ones(1)
    assert loader["a"][0] == 9
    assert loader.all_keys == ["a", "b", "new"]


def test_copies_and_pickles_read_the_same_folder(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert torch.equal(twin["a"], loader["a"])


def test_a_held_loader_keeps_its_weights_when_the_folder_is_used_again(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    offload_state_dict(folder, {"a": torch.full((4,), 9.0)})
    assert torch.equal(loader["a"], torch.arange(4.0))


def test_more_files_than_can_be_held_are_recognised_when_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acc_bigmodel.stores.disk._HELD_FILES", 0)
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    assert torch.equal(loader["b"], torch.ones(2, dtype=torch.bfloat16))
    offload_state_dict(folder, {"a": torch.full((4,), 9.0)})
    with pytest.raises(RuntimeError, match=r"a\.dat was replaced"):
        loader["a"]


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "a.dat").write_bytes(bytes(3))
    with pytest.raises(ValueError, match=r"a\.dat has 3 bytes, but float32 of shape \(4,\) has 16"):
        OffloadedWeightsLoader(save_folder=folder)["a"]


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    for text in ("{", "[]", '{"a": 1}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json"):
            OffloadedWeightsLoader(save_folder=tmp_path)


def test_weights_come_on_the_wanted_device(folder: Path) -> None:
    assert OffloadedWeightsLoader(save_folder=folder, device="meta")["a"].is_meta


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles_carry_what_was_changed(folder: Path, again: Callable) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    loader["a"].data.zero_()
    twin = again(loader)
    assert torch.equal(twin["a"], torch.zeros(4))
    assert set(twin.state_dict) == {"a"}  # the rest is mapped
    twin["a"].add_(1)
    twin["b"].add_(1)
    assert torch.equal(loader["a"], torch.zeros(4))
    assert torch.equal(loader["b"], torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles_keep_the_weights_of_a_folder_used_again(folder: Path, again: Callable) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    offload_state_dict(folder, {"a": torch.full((4,), 9.0)})
    (folder / "b.dat").unlink()
    twin = again(loader)
    assert torch.equal(twin["a"], torch.arange(4.0))
    assert torch.equal(twin["b"], torch.ones(2, dtype=torch.bfloat16))


def test_a_copy_holds_its_files_as_the_original_does(folder: Path) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)
    loader.hold()
    twin = copy.deepcopy(loader)
    offload_state_dict(folder, {"a": torch.full((4,), 9.0)})
    assert torch.equal(twin["a"], torch.arange(4.0))


def test_a_pickle_says_when_a_file_was_replaced_after_it(folder: Path) -> None:
    for loader in (OffloadedWeightsLoader(save_folder=folder), OffloadedWeightsLoader(save_folder=folder)):
        loader.hold()
        text = pickle.dumps(loader)
        offload_state_dict(folder, {"a": torch.full((4,), 9.0)})
        with pytest.raises(ReplacedFileError, match=r"a\.dat was replaced"):
            pickle.loads(text)["a"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_slices_of_a_replaced_file_are_carried_too(tmp_path: Path, again: Callable) -> None:
    file = tmp_path / "w.safetensors"
    write_safetensors(file, {"x": Entry.of(torch.arange(3.0)), "y": Entry.of(torch.ones(1))})
    index = {name: {"safetensors_file": str(file)} for name in "xy"}
    loader = OffloadedWeightsLoader(index=index)
    loader.hold()
    loader["x"].mul_(2)
    fresh = again(loader)
    assert (set(fresh.state_dict), fresh["x"].tolist(), fresh["y"].tolist()) == ({"x"}, [0, 2, 4], [1])
    write_safetensors(tmp_path / "new", {"x": Entry.of(torch.zeros(3)), "y": Entry.of(torch.zeros(1))})
    (tmp_path / "new").rename(file)
    twin = again(loader)
    assert (twin["x"].tolist(), twin["y"].tolist()) == ([0, 2, 4], [1])


def test_tied_names_are_one_tensor_in_copies_too(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    offload_or_reuse(tmp_path, {"e": weight, "h": weight})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert loader["e"] is loader["h"]
    assert loader.alias_of("h") == "e"
    loader["h"].add_(1)
    twin = copy.deepcopy(loader)
    assert twin["e"] is twin["h"]
    assert twin["e"].tolist() == [1, 2, 3]


def test_a_relative_folder_stays_the_same_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    offload_state_dict("off", {"a": torch.ones(1)})
    write_safetensors("w.safetensors", {"x": Entry.of(torch.arange(3.0))})
    loaders = [
        OffloadedWeightsLoader(save_folder="off"),
        OffloadedWeightsLoader(index={"a": {"safetensors_file": "w.safetensors", "weight_name": "x"}}),
    ]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for loader in loaders:
        for twin in (copy.deepcopy(loader), loader, pickle.loads(pickle.dumps(loader))):
            assert twin["a"][-1] > 0


def test_what_is_in_memory_or_mapped_is_at_hand_and_what_is_converted_or_moved_is_not(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    write_safetensors(file, {"s": Entry.of(torch.ones(3))})
    slices = {
        "same": {"safetensors_file": str(file), "weight_name": "s", "dtype": "float32"},
        "as it is": {"safetensors_file": str(file), "weight_name": "s"},
        "converted": {"safetensors_file": str(file), "weight_name": "s", "dtype": "bfloat16"},
        "gone": {"safetensors_file": str(tmp_path / "none"), "dtype": "float32"},
    }
    index = {**OffloadedWeightsLoader(save_folder=folder).index, **slices}
    loader = OffloadedWeightsLoader({"mine": torch.ones(1)}, folder, index)
    at_hand = {name for name in loader if loader.is_at_hand(name)}
    assert at_hand == {"mine", "a", "b", "same", "as it is", "gone"}  # reading "gone" will say that it is
    loader["converted"] = torch.ones(3)
    assert loader.is_at_hand("converted")
    moved = OffloadedWeightsLoader({"mine": torch.ones(1)}, folder, device="cpu")
    assert [name for name in moved if moved.is_at_hand(name)] == ["mine"]
