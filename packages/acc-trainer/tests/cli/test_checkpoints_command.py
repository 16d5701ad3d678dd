"""`acc checkpoints` shows what lies in a folder; its exit code says whether something can be loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acc_trainer.checkpoint.manifest import Manifest, files_of
from acc_trainer.cli.checkpoints import main


def _whole(folder, **known):
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "manifest.json").write_text(Manifest(files=files_of(folder), **known).to_text())
    return folder


@pytest.fixture
def project(tmp_path):
    for number in range(2):
        _whole(tmp_path / "checkpoints" / f"checkpoint_{number}", step=5 * number, metric=0.5)
    return tmp_path


def test_a_project_its_folder_of_checkpoints_and_one_checkpoint_are_shown(project, capsys):
    assert main([str(project)]) == 0
    table = capsys.readouterr().out
    assert main([str(project / "checkpoints")]) == 0
    assert capsys.readouterr().out == table
    assert "checkpoint_1     5" in table
    assert table.splitlines()[2].endswith("whole, the newest")
    assert main([str(project / "checkpoints" / "checkpoint_0")]) == 0
    assert "checkpoint_0" in capsys.readouterr().out


def test_the_exit_code_says_what_can_be_loaded(project, capsys):
    home = project / "checkpoints"
    (home / ".checkpoint_2.writing").mkdir()  # a save at work
    assert main(["--check", str(project)]) == 0
    (home / "checkpoint_1" / "a.bin").write_bytes(b"1234!")
    assert main([str(project)]) == 0
    assert main(["--check", str(project)]) == 1
    assert "not whole: the bytes of a.bin have changed" in capsys.readouterr().out
    for number in range(2):
        (home / f"checkpoint_{number}" / "a.bin").unlink()
    assert main([str(project)]) == 1
    (project / "empty").mkdir()
    assert main([str(project / "empty")]) == 1
    assert "no checkpoints in" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "missing")]) == 2
    assert main(["one", "two"]) == 2
    assert main(["--chek"]) == 2
    assert main(["--check"]) == 2
    assert capsys.readouterr().err.count("\n") == 4


def test_the_command_starts_without_torch(project):
    code = (
        "import sys; from acc_trainer.cli.main import main; "
        "main(['checkpoints', '--check', sys.argv[1]]); print('torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(project)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[-1] == "False"
