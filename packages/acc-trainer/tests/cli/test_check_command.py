"""`acc test` speaks in its own name."""

from __future__ import annotations

from acc_trainer.cli.check import main


def test_a_mistake_is_answered_by_acc_test(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["--num_processes", "x"]) == 2
    assert capsys.readouterr().err == "acc test: num_processes: expected a whole number, got 'x'\n"
