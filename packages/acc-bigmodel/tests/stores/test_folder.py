"""The files of an offload folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from acc_bigmodel import OffloadedWeightsLoader, offload_state_dict
from acc_bigmodel.stores.folder import (
    merge_index,
    raw_file,
    read_offload_index,
    replacing,
    same_bytes,
    write_raw,
)
from acc_ops.testing import run_threads
from acc_ops.world import current_world


def test_two_names_never_share_a_file(tmp_path: Path) -> None:
    state = {"a/b": torch.ones(2), "a%2Fb": torch.zeros(2), "a%252Fb": torch.full((2,), 3.0)}
    offload_state_dict(tmp_path, state)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[name], value) for name, value in state.items())


def test_a_folder_from_before_percent_was_escaped_is_read(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"50%": torch.ones(2)})
    (tmp_path / "50%25.dat").rename(tmp_path / "50%.dat")
    assert OffloadedWeightsLoader(save_folder=tmp_path)["50%"].tolist() == [1, 1]


def test_many_writers_at_once_lose_no_entry(tmp_path: Path) -> None:
    def write() -> None:
        rank = current_world().rank
        for step in range(20):
            merge_index(tmp_path, {f"{rank}.{step}": {"dtype": "float32", "shape": [1]}})

    run_threads(4, write)
    assert len(read_offload_index(tmp_path)) == 80
    assert [file.name for file in tmp_path.iterdir()] == ["index.json"]


def test_many_writers_of_one_file_leave_it_whole(tmp_path: Path) -> None:
    weight = torch.arange(5000.0)

    def write() -> None:
        for _ in range(20):
            write_raw(weight, raw_file(tmp_path, "w"))

    run_threads(4, write)
    assert (tmp_path / "w.dat").stat().st_size == weight.nbytes
    assert [file.name for file in tmp_path.iterdir()] == ["w.dat"]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(KeyError), replacing(file) as staged:
        Path(staged).write_text("new")
        raise KeyError
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_index_that_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    entry = {"a": {"dtype": "float32", "shape": [1]}}
    merge_index(tmp_path, entry)
    before = (tmp_path / "index.json").stat()
    merge_index(tmp_path, entry)
    assert (tmp_path / "index.json").stat().st_ino == before.st_ino
    merge_index(tmp_path, {}, lambda name, info: name == "a")
    assert json.loads((tmp_path / "index.json").read_text()) == {}


def test_bytes_are_compared_whatever_the_strides() -> None:
    one, conjugated = torch.ones(1, 6)[:, 2], torch.tensor([1 + 2j]).conj()
    assert same_bytes(one, torch.ones(1))
    assert same_bytes(conjugated, torch.tensor([1 - 2j]))
    assert same_bytes(torch.ones(0, 3), torch.ones(0, 3))
    assert not same_bytes(one, torch.zeros(1))
    assert not same_bytes(one, torch.ones(1, 1))
