from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from acc_bigmodel import save_weights
from acc_plugins.states.files import find_optimizer, fsdp_folder, fsdp_weights, open_weights, optimizer_folder


def test_names_are_those_of_the_specification() -> None:
    assert [fsdp_weights(name) for name in ("model", "model_2")] == [
        "pytorch_model_fsdp",
        "pytorch_model_fsdp_2",
    ]
    assert [fsdp_folder(name) for name in ("model", "model_2")] == [
        "pytorch_model_fsdp_0",
        "pytorch_model_fsdp_2",
    ]
    assert [optimizer_folder(name) for name in ("optimizer", "optimizer_2")] == ["optimizer_0", "optimizer_2"]


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value), "b": torch.full((4,), value)}


@pytest.mark.parametrize("kind", ["safetensors", "index", "torch", "fsdp", "shards"])
@pytest.mark.parametrize("name", ["model", "model_1"])
def test_weights_are_found_in_every_form(tmp_path: Path, write_shards: Any, kind: str, name: str) -> None:
    state = _weights(3.0)
    if kind == "fsdp":
        torch.save(state, tmp_path / f"{fsdp_weights(name)}.bin")
    elif kind == "shards":
        write_shards(tmp_path / fsdp_folder(name), {("model", key): value for key, value in state.items()})
    else:
        save_weights(state, tmp_path, name, 20 if kind == "index" else None, safe=kind != "torch")
    store = open_weights(tmp_path, name)
    assert {key: store[key].tolist() for key in store} == {
        key: value.tolist() for key, value in state.items()
    }


def test_weights_that_are_not_there_are_an_error_that_tells_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"model_1\.safetensors.*pytorch_model_fsdp_1\.bin.*folder pytorch_model_fsdp_1",
    ):
        open_weights(tmp_path, "model_1")
    with pytest.raises(FileNotFoundError, match=r"optimizer\.bin nor a folder optimizer_0"):
        find_optimizer(tmp_path, "optimizer")


def test_of_several_forms_the_newest_is_taken_and_a_warning_names_the_other(
    tmp_path: Path, write_shards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_weights(_weights(1.0), tmp_path, "model")
    write_shards(tmp_path / "pytorch_model_fsdp_0", {("model", "a"): torch.full((2, 3), 2.0)})
    os.utime(tmp_path / "model.safetensors", (1, 1))
    with caplog.at_level(logging.WARNING):
        assert open_weights(tmp_path, "model")["a"][0, 0] == 2
    assert "model.safetensors was written before" in caplog.text
    os.utime(tmp_path / "pytorch_model_fsdp_0" / ".metadata", (0, 0))
    assert open_weights(tmp_path, "model")["a"][0, 0] == 1


def test_the_folder_of_shards_may_be_given_itself(tmp_path: Path, write_shards: Any) -> None:
    folder = write_shards(tmp_path / "anything", {("model", "a"): torch.ones(2)})
    assert list(open_weights(folder, "model")) == ["a"]
    assert find_optimizer(folder, "optimizer") == folder
