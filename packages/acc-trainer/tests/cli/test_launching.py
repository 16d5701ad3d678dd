"""`acc launch` through argparse: the same options, read the same way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from acc_ops.options import options_of
from acc_trainer.cli.launching import launch_command, launch_command_parser
from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.options import LaunchOptions


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_every_option_of_acc_launch_is_there() -> None:
    given = vars(launch_command_parser().parse_args(["x.py"]))
    assert {chosen.name for chosen in options_of(LaunchOptions)} <= set(given)
    assert {name for name, value in given.items() if value is not None} == {
        "training_script",
        "training_script_args",
        "nondefault",
    }


@pytest.mark.parametrize(
    "words",
    [
        ["--cpu", "x.py", "--cpu", "-q"],
        ["--num-processes", "2", "-q", "--cpu", "false", "-m", "package.module", "--x=1"],
        ["-t", "3", "--fsdp_use_orig_params", "false", "--debug=true", "x.py"],
        ["--fp8_override_linear_precision", "true,false,false", "x.py", "--", "y"],
    ],
)
def test_words_mean_what_they_mean_to_acc_launch(words: list[str]) -> None:
    given = launch_command_parser().parse_args(words)
    read = read_arguments(words)
    assert {name: getattr(given, name) for name in read.given} == read.given
    assert given.nondefault == {*read.given, "training_script", "training_script_args"}
    assert (given.training_script, given.training_script_args) == (read.script, read.script_args)


def test_a_script_runs_beside_this_process_and_its_exit_code_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(os.environ['ACCELERATE_MIXED_PRECISION'], *sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n"
    )
    parser = launch_command_parser()
    launch_command(parser.parse_args(["--cpu", "--mixed_precision", "bf16", str(script), "0", "-q"]))
    shown = capfd.readouterr()
    assert shown.out == "bf16 0 -q\n"
    assert "acc launch: --num_processes was not given" in shown.err
    with pytest.raises(SystemExit) as ended:
        launch_command(parser.parse_args(["--cpu", "--quiet", str(script), "7"]))
    assert ended.value.code == 7


def test_a_program_may_change_the_namespace_before_it_launches(capsys: pytest.CaptureFixture[str]) -> None:
    program = argparse.ArgumentParser()
    launch_command_parser(program.add_subparsers())
    args: Any = program.parse_args(["launch", "--cpu", "-m", "package", "-x"])
    args.num_processes, args.dry_run = 3, True
    args.func(args)
    shown = capsys.readouterr().out
    assert "processes     3 (here)" in shown
    assert "-m package -x" in shown
    args.num_processes = 0
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        args.func(args)
