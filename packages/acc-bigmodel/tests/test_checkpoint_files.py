"""Which files a checkpoint consists of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from acc_bigmodel import checkpoint_files, open_store, save_weights
from acc_bigmodel.checkpoint_files import find_checkpoint

STATE = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 4}


def value(path: Path | str) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in open_store(path).items()}


WANTED = {name: tensor.tolist() for name, tensor in STATE.items()}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [None, 16])
def test_a_file_an_index_and_a_folder_are_read(tmp_path: Path, safe: bool, limit: int | None) -> None:
    written = save_weights(STATE, tmp_path, "model", limit, safe)
    assert value(tmp_path) == WANTED
    assert value(str(tmp_path)) == WANTED
    assert value(tmp_path / written[-1]) == WANTED


def test_a_complete_set_of_shards_needs_no_index(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, "weights", 16)
    (tmp_path / "weights.safetensors.index.json").unlink()
    assert value(tmp_path) == WANTED
    (tmp_path / "weights-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="incomplete set of shards: weights-00001-of-00002"):
        open_store(tmp_path)


def test_a_single_safetensors_file_of_any_name_is_read(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, "diffusion_model")
    assert value(tmp_path) == WANTED


def test_an_older_whole_file_beside_newer_shards_is_not_read_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_weights({"a": torch.zeros(4)}, tmp_path / "old", "model")
    save_weights(STATE, tmp_path, "model", 16)
    os.replace(tmp_path / "old" / "model.safetensors", tmp_path / "model.safetensors")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert value(tmp_path) == WANTED
    assert "holds both model.safetensors.index.json and model.safetensors" in caplog.text
    os.utime(tmp_path / "model.safetensors.index.json", (0, 0))
    assert value(tmp_path) == {"a": [0.0] * 4}


def test_safetensors_go_before_torch_files_and_a_newer_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_weights(STATE, tmp_path, "model")
    torch.save({"a": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    os.utime(tmp_path / "pytorch_model.bin", (1, 1))
    assert value(tmp_path) == WANTED
    assert not caplog.text
    os.utime(tmp_path / "model.safetensors", (0, 0))
    assert value(tmp_path) == WANTED
    assert "pytorch_model.bin is newer" in caplog.text


def test_nothing_usable_is_said_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds nothing"):
        find_checkpoint(tmp_path)
    (tmp_path / "optimizer.bin").touch()
    with pytest.raises(ValueError, match=r"it holds optimizer\.bin"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="neither a weights file"):
        find_checkpoint(tmp_path / "nowhere")


def test_several_indexes_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_weights(STATE, tmp_path, name, 16)
    with pytest.raises(ValueError, match=r"several indexes: one\.safetensors\.index\.json, two"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not a JSON index"),
        ("[]", "is not an index of shards"),
        ('{"weight_map": {}}', "names no shards"),
        ('{"weight_map": {"a": 1}}', "is not an index of shards"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "must be files in the folder of their index"),
        ('{"weight_map": {"a": "/elsewhere.safetensors"}}', "must be files in the folder of their index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "which is not there"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        find_checkpoint(file)


def test_an_index_that_lies_about_a_shard_is_refused(tmp_path: Path) -> None:
    *_, index = save_weights(STATE, tmp_path, "model", 16)
    content = json.loads((tmp_path / index).read_text())
    content["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (tmp_path / index).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="says that 'c' is in model-00001"):
        open_store(tmp_path)


def test_a_hub_id_is_fetched_as_safetensors_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns[0]))
        if allow_patterns[0] == "*.bin":
            save_weights(STATE, tmp_path, "model", safe=False)
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setattr(checkpoint_files, "require", lambda *args, **kwargs: hub)
    assert value("someone/model") == WANTED
    assert asked == [("someone/model", "*.safetensors"), ("someone/model", "*.bin")]


def test_a_hub_repository_comes_from_the_cache_when_there_is_no_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="hub ids need it")
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for file in save_weights(STATE, tmp_path / "saved", "model", 16):
        os.replace(tmp_path / "saved" / file, repository / "blobs" / file)
        os.symlink(f"../../blobs/{file}", snapshot / file)
    script = """
from acc_bigmodel import open_store
print({name: tensor.tolist() for name, tensor in open_store("someone/model").items()})
try:
    open_store("someone/unknown")
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    first, second = done.stdout.splitlines()[:2]
    assert first == str(WANTED)
    assert "no file or folder 'someone/unknown' here, and no hub repository of that name can be had" in second


@pytest.mark.parametrize("error", [FileNotFoundError("not cached"), ValueError("no such name")])
def test_a_hub_repository_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        raise error

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setattr(checkpoint_files, "require", lambda *args, **kwargs: hub)
    with pytest.raises(ValueError, match=rf"'someone/model' here, .*{error}"):
        open_store("someone/model")


def test_a_name_that_stands_twice_in_an_index_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json .*'a' stands in it twice"):
        find_checkpoint(file)
