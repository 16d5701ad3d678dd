"""Tensors to an offload folder and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    OffloadedWeightsLoader,
    disk_offload,
    dispatch_model,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from acc_bigmodel.offload import offload_or_reuse
from acc_ops.testing import run_threads
from acc_ops.world import current_world

TENSORS = {
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "bf16_t": torch.randn(3, 5).bfloat16().t(),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "int64": torch.arange(4),
    "needs_grad": nn.Parameter(torch.randn(2)),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "a/b": torch.ones(2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_survives(tmp_path: Path, name: str) -> None:  # case big/58
    tensor = TENSORS[name]
    offload_state_dict(tmp_path, {name: tensor})
    read = OffloadedWeightsLoader(save_folder=tmp_path)[name]
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    same = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (read, tensor)]
    assert torch.equal(*same)


def test_a_file_holds_the_bytes_and_the_index_says_what_they_are(tmp_path: Path) -> None:
    index: dict = {}
    assert offload_weight(torch.tensor([1, 2], dtype=torch.int16), "w", tmp_path, index) is index
    assert index == {"w": {"dtype": "int16", "shape": [2]}}
    assert (tmp_path / "w.dat").read_bytes() == b"\x01\x00\x02\x00"
    assert load_offloaded_weight(tmp_path / "w.dat", index["w"]).tolist() == [1, 2]
    assert offload_weight(torch.ones(1), "v", tmp_path) is None


def test_the_index_is_merged_and_nothing_makes_no_file(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    save_offload_index(None, tmp_path)
    assert not list(tmp_path.iterdir())
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [2]}}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_weights_come_back_into_the_model(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    load_offloaded_weights(model, None, tmp_path)
    assert model.weight.is_meta
    offload_state_dict(tmp_path, source.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model.weight, source.weight)
    assert torch.equal(model.bias, source.bias)


def test_submodules_are_taken_by_whole_names() -> None:
    state = {name: torch.ones(1) for name in ("a.w", "a.b.w", "ab.w", "c")}
    assert list(extract_submodules_state_dict(state, ["a"])) == ["a.w", "a.b.w"]
    assert list(extract_submodules_state_dict(state, ["a.b", "c"])) == ["a.b.w", "c"]
    assert list(extract_submodules_state_dict(state, [""])) == list(state)


def test_meta_has_nothing_to_offload(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'w' is on the meta device"):
        offload_weight(torch.ones(1, device="meta"), "w", tmp_path)


def test_a_folder_is_reused_where_its_bytes_are_the_same(tmp_path: Path) -> None:
    state = {"a": torch.arange(4.0), "nan": torch.tensor([float("nan")])}
    offload_or_reuse(tmp_path, state)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    index = offload_or_reuse(tmp_path, {**state, "c": torch.ones(1)})
    assert {
        file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat") if file.name != "c.dat"
    } == before
    assert set(index) == {"a", "nan", "c"}
    offload_or_reuse(tmp_path, {"a": torch.arange(4.0) + 1})
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 2, 3, 4]


def test_a_meta_tensor_uses_the_folder_only_if_it_fits(tmp_path: Path) -> None:
    offload_or_reuse(tmp_path, {"a": torch.arange(4.0)})
    assert set(offload_or_reuse(tmp_path, {"a": torch.empty(4, device="meta")})) == {"a"}
    with pytest.raises(RuntimeError, match="belongs to another model"):
        offload_or_reuse(tmp_path, {"a": torch.empty(5, device="meta")})
    with pytest.raises(RuntimeError, match="does not hold it either"):
        offload_or_reuse(tmp_path, {"b": torch.empty(5, device="meta")})


def test_names_that_share_a_tensor_share_a_file(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    index = offload_or_reuse(tmp_path, {"e": weight, "h": weight, "u": weight.clone()})
    assert index["h"] == {"dtype": "float32", "shape": [3], "same_as": "e"}
    assert sorted(file.name for file in tmp_path.glob("*.dat")) == ["e.dat", "u.dat"]
    assert offload_or_reuse(tmp_path, {"e": weight, "h": weight}) == {name: index[name] for name in "eh"}
    assert OffloadedWeightsLoader(save_folder=tmp_path)["h"].tolist() == [0, 1, 2]


def test_an_entry_that_shared_a_file_goes_when_the_file_is_replaced(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    offload_or_reuse(tmp_path, {"e": weight, "h": weight})
    offload_or_reuse(tmp_path, {"e": weight + 1})
    assert list(OffloadedWeightsLoader(save_folder=tmp_path)) == ["e"]
    index = offload_or_reuse(tmp_path, {"h": weight, "e": weight})  # the other way round
    assert index["e"]["same_as"] == "h"
    index = offload_or_reuse(tmp_path, {"h": weight, "e": weight.clone()})  # not tied any more
    assert "same_as" not in index["e"]
    assert OffloadedWeightsLoader(save_folder=tmp_path)["e"].tolist() == [0, 1, 2]


def test_tied_placeholders_share_what_an_older_folder_has_twice(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"e": torch.ones(2), "h": torch.ones(2), "u": torch.zeros(2)})
    empty = torch.empty(2, device="meta")
    index = offload_or_reuse(tmp_path, {"e": empty, "h": empty, "u": empty})
    assert [index[name].get("same_as") for name in "ehu"] == [None, "e", None]


def test_a_tensor_of_one_element_is_recognised_whatever_its_strides(tmp_path: Path) -> None:
    tensor = torch.randn(1, 6)[:, 2]
    offload_or_reuse(tmp_path, {"w": tensor})
    written = (tmp_path / "w.dat").stat().st_ino
    offload_or_reuse(tmp_path, {"w": tensor})
    assert (tmp_path / "w.dat").stat().st_ino == written


def test_several_ranks_offload_the_same_model_at_once(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.full((64,), float(i)) for i in range(12)}

    def offload() -> bool:
        loader = OffloadedWeightsLoader(save_folder=tmp_path, index=offload_or_reuse(tmp_path, state))
        loader.hold()
        return all(torch.equal(loader[name], value) for name, value in state.items())

    assert all(run_threads(4, offload))
    assert set(OffloadedWeightsLoader(save_folder=tmp_path)) == set(state)


def test_what_is_being_replaced_is_not_in_the_index_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed then leaves a folder that lacks it, not one with weights of two models."""
    first = {"a": torch.ones(2), "b": torch.ones(2), "kept": torch.ones(3)}
    second = {"a": torch.zeros(2), "b": torch.zeros(2), "kept": torch.ones(3)}
    write = offload.write_raw

    def killed_after_one(tensor: torch.Tensor, file: str) -> None:
        write(tensor, file)
        raise KeyboardInterrupt

    for again in (offload_or_reuse, offload_state_dict):
        offload_state_dict(tmp_path, first)
        with monkeypatch.context() as killing:
            killing.setattr(offload, "write_raw", killed_after_one)
            with pytest.raises(KeyboardInterrupt):
                again(tmp_path, second)
        left = OffloadedWeightsLoader(save_folder=tmp_path)
        assert not {"a", "b"} & set(left)
        again(tmp_path, second)
        left = OffloadedWeightsLoader(save_folder=tmp_path)
        assert all(torch.equal(left[name], value) for name, value in second.items())


def test_two_models_that_are_offloaded_into_one_folder_at_once_run_with_their_own_weights(
    tmp_path: Path,
) -> None:
    def offload_and_run() -> bool:
        own = torch.full((3, 3), float(current_world().rank))
        for turn in range(8):
            model = nn.Linear(3, 3, bias=False).requires_grad_(False)
            model.weight.copy_(own)
            if turn % 2:
                disk_offload(model, tmp_path)
            else:
                dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
            if not torch.equal(model.state_dict()["weight"], own):
                return False
        return True

    assert all(run_threads(3, offload_and_run))
