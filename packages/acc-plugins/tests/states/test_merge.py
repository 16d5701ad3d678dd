from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from acc_bigmodel import load_weights
from acc_ops.testing import run_threads
from acc_plugins.states.merge import merge_fsdp_weights, merge_shards
from acc_plugins.states.shards import ShardFolder
from acc_plugins.states.whole import CheckpointError

STATE = {("model", "a"): torch.arange(12.0).view(4, 3), ("model", "b"): torch.arange(5)}
CHUNKS = {("model", "a"): [((0, 0), (2, 3)), ((2, 0), (2, 3))]}


@pytest.fixture
def checkpoint(tmp_path: Path, write_shards: Any) -> Path:
    """A whole checkpoint: the shards of a model and of an optimizer."""
    write_shards(tmp_path / "ck" / "pytorch_model_fsdp_0", STATE, CHUNKS)
    write_shards(tmp_path / "ck" / "optimizer_0", {("optimizer", "state", "a", "exp_avg"): torch.ones(4, 3)})
    return tmp_path / "ck"


@pytest.mark.parametrize("inside", ["", "pytorch_model_fsdp_0"])
def test_a_checkpoint_or_its_folder_of_shards_becomes_one_file(
    checkpoint: Path, tmp_path: Path, inside: str
) -> None:
    merge_fsdp_weights(str(checkpoint / inside), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    merged = load_weights(tmp_path / "out", "model")
    assert {name: value.tolist() for name, value in merged.items()} == {
        key[1]: value.tolist() for key, value in STATE.items()
    }
    assert (checkpoint / "pytorch_model_fsdp_0" / ".metadata").is_file()


def test_torch_files_are_written_when_they_are_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(str(checkpoint), str(tmp_path / "out"), safe_serialization=False)
    merged = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(merged["a"], STATE["model", "a"])


def test_more_than_the_largest_size_makes_several_files_and_an_index(
    checkpoint: Path, tmp_path: Path
) -> None:
    files = merge_shards(checkpoint, tmp_path / "out", max_shard_size=48)
    assert files == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(
        path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")
    ) == sorted(files)


def test_extra_state_goes_into_torch_files_and_is_named_where_it_is_left_out(
    tmp_path: Path, write_shards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"n": 1}
    write_shards(tmp_path / "shards", {**STATE, ("model", "layer._extra_state"): extra})
    merge_fsdp_weights(str(tmp_path / "shards"), str(tmp_path / "torch"), safe_serialization=False)
    merged = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    assert merged["layer._extra_state"] == extra
    assert set(merged) == {"a", "b", "layer._extra_state"}
    assert caplog.text == ""
    merge_shards(tmp_path / "shards", tmp_path / "safe")
    assert set(load_weights(tmp_path / "safe", "model")) == {"a", "b"}
    assert f"left out of {tmp_path / 'safe'}, because" in caplog.text
    assert "layer._extra_state" in caplog.text


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is read of a folder, and for how many tensors that were read before there is still memory."""
    read, told, kept = ShardFolder.read, [], []

    def noting(self: ShardFolder, key: Any, box: Any = None) -> torch.Tensor:
        tensor = read(self, key, box)
        told.append((key, sum(ref() is not None for ref in kept)))
        kept.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(ShardFolder, "read", noting)
    return told


def test_every_tensor_is_read_once_for_torch_files(
    checkpoint: Path, tmp_path: Path, reads: list[Any]
) -> None:
    merge_shards(checkpoint, tmp_path / "out", safe_serialization=False)
    assert sorted(key for key, _ in reads) == [("model", "a"), ("model", "b")]


def test_one_tensor_at_a_time_is_in_memory(checkpoint: Path, tmp_path: Path, reads: list[Any]) -> None:
    merge_shards(checkpoint, tmp_path / "out")
    assert sorted(reads) == [(("model", "a"), 0), (("model", "b"), 0)]


def test_the_shards_go_only_when_they_are_merged_and_only_they(checkpoint: Path, tmp_path: Path) -> None:
    shards = checkpoint / "pytorch_model_fsdp_0"
    with pytest.raises(
        ValueError, match=r"a whole checkpoint, of which more would go: name .*pytorch_model_fsdp_0"
    ):
        merge_shards(checkpoint, tmp_path / "out", remove_checkpoint_dir=True)
    with pytest.raises(ValueError, match="would remove the result"):
        merge_shards(shards, shards / "out", remove_checkpoint_dir=True)
    (tmp_path / "a file").write_text("")
    with pytest.raises(NotADirectoryError):
        merge_shards(shards, tmp_path / "a file", remove_checkpoint_dir=True)
    assert (shards / ".metadata").is_file()
    merge_shards(shards, tmp_path / "out", remove_checkpoint_dir=True)
    assert not shards.exists()
    assert (checkpoint / "optimizer_0" / ".metadata").is_file()


MANIFEST = json.dumps(
    {"format": 1, "world_size": 1, "files": {"pytorch_model_fsdp_0/.metadata": {"bytes": 1, "crc32": 0}}},
    indent=1,
)


@pytest.mark.parametrize("text", [MANIFEST, MANIFEST[:20]], ids=["whole", "half of it is left"])
def test_a_checkpoint_of_save_state_stays_whole(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    shards, out = checkpoint / "pytorch_model_fsdp_0", tmp_path / "out"

    def refused(message: str, *arguments: str, **options: bool) -> None:
        with pytest.raises(CheckpointError, match=message):
            merge_fsdp_weights(*arguments, **options)

    refused("is a checkpoint of save_state, merging weights", str(checkpoint), str(checkpoint))
    refused("is a part of the checkpoint .*ck, merging weights", str(checkpoint), str(shards))
    refused(
        "is a part of the checkpoint .*ck, remove_checkpoint_dir",
        str(shards),
        str(out),
        remove_checkpoint_dir=True,
    )
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    assert not out.exists()
    merge_fsdp_weights(str(checkpoint), str(out))
    if text == MANIFEST:  # a folder of its own, in the checkpoint
        merge_fsdp_weights(str(checkpoint), str(checkpoint / "merged"))
        assert (checkpoint / "merged" / "model.safetensors").is_file()


def test_a_manifest_of_something_else_forbids_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"name": "a web application"}')
    shards = checkpoint / "pytorch_model_fsdp_0"
    merge_fsdp_weights(str(shards), str(checkpoint), remove_checkpoint_dir=True)
    assert (checkpoint / "model.safetensors").is_file()
    assert not shards.exists()


@pytest.mark.parametrize("wrong", ["optimizer_0", "nothing"])
def test_the_hint_names_the_folder_of_the_weights(checkpoint: Path, tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"Please pass the folder of the weights: .*pytorch_model_fsdp_0"):
        merge_shards(checkpoint / wrong, tmp_path / "out")


def test_files_that_need_no_merging_are_named(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(
        ValueError, match=r"couldn't find a valid metadata file.*need no merging: pytorch_model_fsdp\.bin"
    ):
        merge_shards(tmp_path, tmp_path / "out")


def test_of_several_models_one_must_be_named(checkpoint: Path, tmp_path: Path, write_shards: Any) -> None:
    write_shards(checkpoint / "pytorch_model_fsdp_1", STATE)
    with pytest.raises(ValueError, match=r"shards of 2 models: name one of .*pytorch_model_fsdp_1"):
        merge_shards(checkpoint, tmp_path / "out")


def test_the_main_process_merges_and_its_error_is_that_of_all(
    checkpoint: Path, tmp_path: Path, reads: list[Any]
) -> None:
    run_threads(3, lambda: merge_fsdp_weights(str(checkpoint), str(tmp_path / "out")))
    assert len(reads) == len(STATE)

    def fails() -> str:
        with pytest.raises(ValueError, match="couldn't find a valid metadata file") as caught:
            merge_fsdp_weights(str(tmp_path / "nothing"), str(tmp_path / "out"))
        return str(caught.value)

    assert len(set(run_threads(3, fails))) == 1
