"""`acc config default` writes a file that `acc launch` reads, and never overwrites one."""

from __future__ import annotations

import argparse

import pytest

from acc_ops.options import from_mapping
from acc_trainer.cli.config import default_command_parser, default_config, main, write_basic_config
from acc_trainer.launch.config_file import read_config_file
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.options import LaunchOptions


def test_the_file_is_read_back_as_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["default", "--mixed_precision", "bf16"]) == 0
    path = tmp_path / "accelerate" / "default_config.yaml"
    assert str(path) in capsys.readouterr().out
    options = from_mapping(LaunchOptions, read_config_file(str(path)))
    assert (options.mixed_precision, options.num_processes, options.cpu) == ("bf16", 1, True)


def test_an_existing_file_is_left_alone(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("mixed_precision: fp16\n")
    assert main(["default", "--config-file", str(path)]) == 0
    assert path.read_text() == "mixed_precision: fp16\n"
    assert "exists already" in capsys.readouterr().out


def test_several_accelerators_get_one_process_each():
    content = default_config("no", 4)
    assert (content["num_processes"], content["distributed_type"], content["use_cpu"]) == (
        4,
        "MULTI_GPU",
        False,
    )


def test_an_unknown_precision_is_refused():
    with pytest.raises(LaunchError, match="got 'fp9'"):
        default_config("fp9", 0)
    assert main(["default", "--mixed_precision", "fp9"]) == 2
    assert main(["update"]) == 2


def test_a_place_where_no_file_can_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path, said in (
        ("", "--config_file is empty"),
        (str(tmp_path), "is a folder: name a file in it"),
        (str(tmp_path / "file" / "c.yaml"), "cannot be written: "),
    ):
        assert main(["default", "--config_file", path]) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert shown.err.startswith("acc config: --config_file")
        assert said in shown.err


def test_a_program_writes_one_where_none_is(tmp_path, capsys):
    path = tmp_path / "deep" / "c.yaml"
    assert write_basic_config("BF16", str(path)) == path
    before = path.read_text()
    assert write_basic_config("no", str(path)) is False
    assert path.read_text() == before
    assert "exists already" in capsys.readouterr().out
    with pytest.raises(ValueError, match="got 'fp9'"):
        write_basic_config("fp9", str(tmp_path / "other"))


def test_default_is_one_command_of_a_larger_program(tmp_path, capsys):
    program, shared = argparse.ArgumentParser(), argparse.ArgumentParser(add_help=False)
    shared.add_argument("--shared")
    default_command_parser(program.add_subparsers(), [shared])
    path = tmp_path / "c.yaml"
    args = program.parse_args(
        ["default", "--config-file", str(path), "--mixed-precision", "fp16", "--shared", "1"]
    )
    args.func(args)
    assert str(path) in capsys.readouterr().out
    assert read_config_file(str(path))["mixed_precision"] == "fp16"
    assert args.shared == "1"
