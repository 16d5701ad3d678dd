"""`acc` finds its command, and says what it does not know."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from acc_trainer.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


def test_an_unknown_command_names_the_closest_one(capsys):
    assert main(["lunch"]) == 2
    assert "no command 'lunch'; did you mean `acc launch`?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert f"there are: {', '.join(COMMANDS)}" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_it_is_an_error(capsys):
    assert main([]) == 2
    assert "usage: acc" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    from acc_trainer.__about__ import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"acc-trainer {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert import_module(f"acc_trainer.cli.{COMMANDS[name][0]}").main(["--help"]) == 0
    assert f"usage: acc {name}" in capsys.readouterr().out


def test_the_command_line_starts_without_torch_or_yaml_and_its_help_without_logging():
    code = (
        "import sys\n"
        "from acc_trainer.cli.main import main\n"
        "main(['--help']); main(['launch', '--help'])\n"
        "print([name for name in ('logging', 'json') if name in sys.modules])\n"
        "main(['launch', '--dry_run', '--cpu', '-m', 'x'])\n"
        "print([name for name in ('torch', 'yaml', 'importlib.metadata', 'subprocess', 'argparse') if name in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [line for line in shown.splitlines() if line.startswith("[")] == ["[]", "[]"]
