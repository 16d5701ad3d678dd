"""`acc env` shows versions, devices and the configuration in use."""

from __future__ import annotations

import pytest

from acc_trainer.cli.env import env_command, env_command_parser, gather_facts, main


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_versions_and_the_missing_configuration_are_shown(capsys):
    import torch

    assert main([]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert "does not exist" in shown


def test_the_configuration_in_use_is_shown(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: bf16\n")
    facts = gather_facts(str(path))
    assert (facts["configuration"], facts["  mixed_precision"]) == (str(path), "bf16")


def test_mistakes_are_one_line(capsys):
    assert main(["--nonsense"]) == 2
    assert main(["--config_file", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_program_gets_what_is_printed(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: bf16\n")
    facts = env_command(env_command_parser().parse_args(["--config-file", str(path)]))
    assert facts["  mixed_precision"] == "bf16"
    assert len(capsys.readouterr().out.splitlines()) == len(facts)
