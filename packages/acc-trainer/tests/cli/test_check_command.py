"""`acc test` speaks in its own name."""

from __future__ import annotations

import pytest

from acc_trainer.cli.check import main
from acc_trainer.cli.check import test_command as run_command
from acc_trainer.cli.check import test_command_parser as command_parser


def test_a_mistake_is_answered_by_acc_test(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["--num_processes", "x"]) == 2
    assert capsys.readouterr().err == "acc test: num_processes: expected a whole number, got 'x'\n"


def test_a_program_starts_the_checks_by_a_namespace(monkeypatch, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("use_cpu: true\nnum_processes: 0\n")
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        run_command(command_parser().parse_args(["--config-file", str(path)]))
    assert command_parser().parse_args([]).config_file is None
