from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from acc_bigmodel import load_weights
from acc_trainer.cli.main import main
from acc_trainer.cli.merge import merge_command_parser


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ck" / "pytorch_model_fsdp_0"
    dcp.save(
        {"model": {"a": torch.ones(4), "b": torch.zeros(4)}},
        storage_writer=dcp.FileSystemWriter(folder),
    )
    return tmp_path / "ck"


def test_shards_become_one_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(checkpoint), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: model.safetensors\n"
    assert load_weights(tmp_path / "out", "model")["a"].tolist() == [1.0] * 4


@pytest.mark.parametrize("dash", ["_", "-"])
def test_every_option_has_an_effect(checkpoint: Path, tmp_path: Path, dash: str) -> None:
    shards = checkpoint / "pytorch_model_fsdp_0"
    flags = [
        f"--unsafe{dash}serialization",
        f"--remove{dash}checkpoint{dash}dir",
        f"--max{dash}shard{dash}size",
        "16",
    ]
    assert main(["merge", str(shards), str(tmp_path / "out"), *flags]) == 0
    assert (tmp_path / "out" / "pytorch_model-00001-of-00002.bin").is_file()
    assert not shards.exists()


def test_a_folder_without_shards_is_exit_code_1_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "couldn't find a valid metadata file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "only one"]) == 2
    assert "output_path" in capsys.readouterr().err
    assert main(["merge", "--help"]) == 0


def test_it_is_one_command_of_a_larger_program(checkpoint: Path, tmp_path: Path) -> None:
    program = ArgumentParser()
    merge_command_parser(program.add_subparsers())
    args = program.parse_args(["merge-weights", str(checkpoint), str(tmp_path / "out")])
    args.func(args)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_checkpoint_is_no_place_for_merged_weights(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "manifest.json").write_text('{"format": 1, "world_size": 1, "files": {}}')
    assert main(["merge", str(checkpoint), str(checkpoint)]) == 1
    assert "is a checkpoint of save_state" in capsys.readouterr().err
    assert not (checkpoint / "model.safetensors").exists()
