"""Each fence, proven by breaking it: in a copy of the workspace one line is added that the fence must refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def fence(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    sources = [str(path / "src") for path in sorted((folder / "packages").iterdir())]
    code = f"import os, sys; os.environ['PYTHONPATH'] = {':'.join(sources)!r}; os.execvp(sys.argv[1], sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *command], cwd=folder, capture_output=True, text=True)


def add(folder: Path, package: str, file: str, text: str) -> None:
    path = folder / "packages" / package / "src" / package.replace("-", "_") / file
    path.write_text((path.read_text() if path.exists() else '"""A new file."""\n') + text)


LAYERS = [str(BIN / "lint-imports"), "tools/importlinter.ini", "--no-cache"]
DEPENDENCIES = [sys.executable, "tools/check_dependencies.py"]
LINT = [str(BIN / "ruff"), "check", "--no-cache", "--config", "tools/ruff.toml", "packages"]


@pytest.mark.parametrize("command", [LAYERS, DEPENDENCIES, LINT], ids=["layers", "dependencies", "lint"])
def test_the_workspace_as_it_stands_passes(workspace_copy: Path, command: list[str]) -> None:
    done = fence(command, workspace_copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_upwards_is_refused(workspace_copy: Path) -> None:
    add(workspace_copy, "acc-ops", "upwards.py", "import acc_hooks\n\n__all__ = ['acc_hooks']\n")
    done = fence(LAYERS, workspace_copy)
    assert done.returncode != 0
    assert "acc_ops.upwards -> acc_hooks" in done.stdout


def test_torch_in_the_planner_is_refused(workspace_copy: Path) -> None:
    add(workspace_copy, "acc-bigmodel", "placement.py", "\nimport torch  # noqa\n")
    done = fence(LAYERS, workspace_copy)
    assert done.returncode != 0
    assert "acc_bigmodel.placement -> torch" in done.stdout


def test_an_undeclared_import_is_refused_wherever_it_stands(workspace_copy: Path) -> None:
    add(
        workspace_copy, "acc-hooks", "hidden.py", "def f() -> object:\n    import numpy\n\n    return numpy\n"
    )
    done = fence(DEPENDENCIES, workspace_copy)
    assert done.returncode != 0
    assert "acc-hooks does not declare numpy" in done.stdout


def test_a_declared_dependency_that_nobody_imports_is_refused(workspace_copy: Path) -> None:
    pyproject = workspace_copy / "packages" / "acc-hooks" / "pyproject.toml"
    pyproject.write_text(
        pyproject.read_text().replace("dependencies = [\n", 'dependencies = [\n  "rich",\n', 1)
    )
    done = fence(DEPENDENCIES, workspace_copy)
    assert done.returncode != 0
    assert "rich is declared but never imported" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import os\n\nHOME = os.environ['HOME']\n", "os.environ"),
        ("import torch\n\nN = torch.cuda.device_count()\n", "torch.cuda"),
        ("from acc_ops.enums import DistributedType\n\nT = DistributedType.NO\n", "DistributedType"),
    ],
    ids=["environment", "device", "distributed type"],
)
def test_what_only_one_file_may_touch_is_refused_elsewhere(
    workspace_copy: Path, line: str, message: str
) -> None:
    add(workspace_copy, "acc-plugins", "touches.py", line)
    done = fence(LINT, workspace_copy)
    assert done.returncode != 0
    assert "TID251" in done.stdout
    assert message in done.stdout


def test_a_wrong_type_is_refused(workspace_copy: Path) -> None:
    add(workspace_copy, "acc-ops", "wrong.py", "\ndef f() -> int:\n    return 'text'\n")
    command = [
        str(BIN / "mypy"),
        "--config-file",
        "tools/mypy.ini",
        "--follow-imports=silent",
        "-m",
        "acc_ops.wrong",
    ]
    done = fence(command, workspace_copy)
    assert done.returncode != 0
    assert "Incompatible return value type" in done.stdout
