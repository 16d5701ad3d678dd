"""`acc launch` answers mistakes with one line and exit code 2, and can show its plan."""

from __future__ import annotations

import pytest

from acc_ops.options import options_of
from acc_trainer.cli.launch import help_text, main
from acc_trainer.launch.options import SECTIONS, LaunchOptions


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    "words", [[], ["nowhere.py"], ["--nmu_processes", "2", "s.py"], ["--cpu", "--num_processes", "0", "s.py"]]
)
def test_a_mistake_is_one_line_and_exit_code_2(words, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("acc launch: ")
    assert shown.err.count("\n") == 1


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path, capsys):
    import socket

    script = tmp_path / "s.py"
    script.write_text("open('started', 'w')\n")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert main(["--cpu", "--num_processes", "2", "--main_process_port", str(port), str(script)]) == 2
    assert f"--main_process_port {port} is in use" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path, capsys):
    script = tmp_path / "s.py"
    script.write_text("raise SystemExit(9)\n")
    assert main(["--cpu", "--dry_run", "--num_processes", "1", str(script)]) == 0
    assert "run by        this process" in capsys.readouterr().out


def test_help_shows_every_option_once():
    named = [name for names in SECTIONS.values() for name in names]
    assert sorted(named) == sorted(chosen.name for chosen in options_of(LaunchOptions))
    text = help_text()
    assert all(f"--{chosen.flag}" in text and chosen.help in text for chosen in options_of(LaunchOptions))
