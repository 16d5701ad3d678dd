"""Tests of the start-up hook: ACC_COMPAT in the environment of any Python."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

SHOW = "import accelerate; print(accelerate.__version__)"
HOOK = Path(__file__).parents[1] / "src" / "acc_compat.pth"


def test_the_hook_is_installed_beside_the_package() -> None:
    files = importlib.metadata.files("acc-compat") or []
    assert "acc_compat.pth" in {str(file) for file in files}
    assert not any(str(file).startswith("accelerate") for file in files)


def test_a_child_answers_to_the_name(python) -> None:
    run = python("-c", SHOW, ACC_COMPAT="1")
    assert (run.stdout, run.stderr, run.returncode) == ("1.15.0\n", "", 0)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_happens_when_it_is_not_set(python, value: str | None) -> None:
    code = "import sys; print(any(name.startswith('acc_compat') for name in sys.modules), [f for f in sys.meta_path if 'acc_' in repr(f)])"
    run = python("-c", code, **({} if value is None else {"ACC_COMPAT": value}))
    assert run.stdout == "False []\n"
    assert run.stderr == ""


def test_a_value_that_means_nothing_is_told_and_python_goes_on(python) -> None:
    run = python("-c", "print('on')", ACC_COMPAT="yes please")
    assert run.stdout == "on\n"
    assert "'yes please'" in run.stderr
    assert run.returncode == 0


def test_another_package_of_the_name_stays_and_that_is_told(python, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "accelerate.py").write_text("__version__ = 'another'\n")
    run = python("-c", SHOW, ACC_COMPAT="1", PYTHONPATH=str(folder))
    assert run.stdout == "another\n"
    assert run.stderr.startswith("acc-compat: accelerate is here already")
    assert len(run.stderr.splitlines()) == 1
    run = python("-c", SHOW, ACC_COMPAT="force", PYTHONPATH=str(folder))
    assert (run.stdout, run.stderr) == ("1.15.0\n", "")


def test_a_broken_hook_is_told_and_python_goes_on(python, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    (folder / "acc_compat").mkdir(parents=True)
    (folder / "acc_compat" / "__init__.py").write_text("raise ValueError('half an installation')\n")
    run = python("-c", "print('on')", ACC_COMPAT="1", PYTHONPATH=str(folder))
    assert run.stdout == "on\n"
    assert "half an installation" in run.stderr
    assert run.returncode == 0
    assert python("-c", "print('on')", PYTHONPATH=str(folder)).stderr == ""


def test_the_hook_imports_nothing_dear(python) -> None:
    code = "import sys; print([m for m in ('torch', 'inspect', 'importlib.metadata', 'acc_compat.api') if m in sys.modules])"
    run = python(
        "-S",
        "-c",
        f"import site; site.addsitedir({str(HOOK.parent)!r}); {code}",
        ACC_COMPAT="1",
        PYTHONPATH=path(),
    )
    assert run.stdout == "[]\n", run.stderr


def path() -> str:
    """The paths of this interpreter, for one that starts without its site packages."""
    return ":".join(entry for entry in sys.path if entry)


def test_wheels_carry_the_hook_at_their_root(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    for version in ("standard", "editable"):
        if version == "editable":
            pytest.importorskip("editables")
        root = Path(__file__).parents[1]
        wheel = next(builder(str(root)).build(directory=str(tmp_path / version), versions=[version]))
        names = zipfile.ZipFile(wheel).namelist()
        assert "acc_compat.pth" in names
        assert not any(name.startswith("accelerate") for name in names)
        assert ("acc_compat/names.txt" in names) == (version == "standard")
