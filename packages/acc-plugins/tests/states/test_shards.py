from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint as dcp

from acc_plugins.states.shards import METADATA, ShardFolder, ShardStore, is_shard_folder


def _cuts(draw: Any, length: int) -> list[tuple[int, int]]:
    marks = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return [(low, high - low) for low, high in itertools.pairwise(marks)] or [(0, 0)]


@st.composite
def _cut_tensors(draw: Any) -> tuple[Tensor, list[Any], Any]:
    """A tensor, chunks that cover it, and a slice of it."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    chunks = (
        [tuple(zip(*cut, strict=True)) for cut in itertools.product(*(_cuts(draw, n) for n in shape))]
        if shape
        else [((), ())]
    )
    box = [(low, draw(st.integers(0, n - low))) for n in shape for low in [draw(st.integers(0, n - 1))]]
    return tensor, draw(st.permutations(chunks)), (tuple(o for o, _ in box), tuple(n for _, n in box))


@given(_cut_tensors())
def test_any_slice_of_a_tensor_is_read_from_whatever_chunks_it_is_in(write_shards: Any, case: Any) -> None:
    tensor, chunks, (offsets, sizes) = case
    with tempfile.TemporaryDirectory() as home:
        key = ("model", "weight")
        folder = ShardFolder(write_shards(Path(home, "x"), {key: tensor}, {key: chunks}))
        assert torch.equal(folder.read(key), tensor)
        expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert torch.equal(folder.read(key, (offsets, sizes)), expected)


def test_only_chunks_that_are_asked_for_are_read(write_shards: Any, tmp_path: Path) -> None:
    key = ("model", "weight")
    chunks = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    folder = ShardFolder(write_shards(tmp_path / "x", {key: torch.ones(4, 3)}, {key: chunks}))
    (tmp_path / "x" / "__1_0.distcp").unlink()
    assert folder.read(key, ((0, 1), (2, 2))).sum() == 4
    with pytest.raises(ValueError, match=r"not whole: __1_0\.distcp is missing"):
        folder.read(key)


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    state = {
        "optimizer": {
            "state": {"a.b": {"step": torch.tensor(3.0), "exp_avg": torch.rand(3, 2)}},
            "param_groups": [{"lr": 0.1, "params": ["a.b"]}],
        }
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "x"))
    assert is_shard_folder(tmp_path / "x")
    folder = ShardFolder(tmp_path / "x")
    assert torch.equal(
        folder.read(("optimizer", "state", "a.b", "exp_avg")), state["optimizer"]["state"]["a.b"]["exp_avg"]
    )
    assert folder.values[("optimizer", "param_groups", 0, "lr")] == 0.1
    assert folder.values[("optimizer", "param_groups", 0, "params")] == ["a.b"]


def test_weights_have_the_names_of_the_model_and_their_shapes_are_known_without_reading(
    write_shards: Any, tmp_path: Path
) -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    store = ShardStore(
        ShardFolder(
            write_shards(
                tmp_path / "x", {("model", "a.weight"): weight, ("model", "a._extra_state"): {"n": 1}}
            )
        )
    )
    for file in (tmp_path / "x").glob("*.distcp"):
        file.unlink()
    assert list(store) == ["a.weight"]
    assert (store.shape("a.weight"), store.dtype("a.weight"), store.nbytes("a.weight")) == (
        (2, 3),
        torch.bfloat16,
        12,
    )
    assert store.others == {"a._extra_state": {"n": 1}}


def test_a_folder_without_metadata_says_what_it_lacks(tmp_path: Path) -> None:
    assert not is_shard_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        ShardFolder(tmp_path)


class _Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_code_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    (tmp_path / METADATA).write_bytes(pickle.dumps(_Runs(str(victim))))
    with pytest.raises(ValueError, match="mkdir, which is no part of a checkpoint"):
        ShardFolder(tmp_path)
    assert not victim.exists()


def test_code_in_an_entry_is_not_run(write_shards: Any, tmp_path: Path) -> None:
    victim = tmp_path / "made"
    folder = write_shards(tmp_path / "x", {("model", "a"): _Runs(str(victim))})
    with pytest.raises(ValueError, match="does not load from an untrusted file"):
        ShardFolder(folder)
    assert not victim.exists()


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/hostname", "sub/x.distcp"])
def test_a_path_cannot_leave_the_folder(write_shards: Any, tmp_path: Path, path: str) -> None:
    folder = write_shards(tmp_path / "x", {("model", "a"): torch.ones(2)})
    content = pickle.loads((folder / METADATA).read_bytes())
    for info in content.storage_data.values():
        info.relative_path = path
    (folder / METADATA).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="outside of its folder"):
        ShardFolder(folder).read(("model", "a"))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(3), pickle.dumps({"a": 1})])
def test_damaged_metadata_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata"):
        ShardFolder(tmp_path)


def test_a_chunk_that_is_cut_off_is_an_error_that_names_the_file(write_shards: Any, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x", {("model", "a"): torch.ones(200)})
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"model\.a cannot be read from .*__0_0\.distcp"):
        ShardFolder(folder).read(("model", "a"))


def test_a_folder_that_lacks_a_chunk_is_an_error(write_shards: Any, tmp_path: Path) -> None:
    key = ("model", "a")
    folder = ShardFolder(write_shards(tmp_path / "x", {key: torch.ones(4)}, {key: [((0,), (2,))]}))
    assert folder.read(key, ((0,), (2,))).sum() == 2
    with pytest.raises(ValueError, match=r"lacks a part of model\.a"):
        folder.read(key)
