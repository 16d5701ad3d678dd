"""Tests of the name `accelerate` in a running interpreter."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

import acc_compat
import acc_compat.api
from acc_compat import alias, names

pytestmark = pytest.mark.usefixtures("name_is_ours")


def test_the_modules_are_the_same_objects_under_both_names() -> None:
    for module in names.modules():
        ours = importlib.import_module(module)
        spec = ours.__spec__
        assert importlib.import_module("accelerate" + module[len(names.API) :]) is ours
        assert ours.__spec__ is not None
        assert spec is not None
        assert ours.__spec__.name == module  # the alias's spec is not left behind
    import accelerate.utils.operations as operations

    assert operations is acc_compat.api.utils.operations


def test_names_are_imported_from_either() -> None:
    from accelerate.utils import str_to_bool as found

    from acc_ops.environment import str_to_bool

    assert found is str_to_bool


def test_the_module_can_be_found_before_and_after_it_is_imported() -> None:
    for name in [name for name in sys.modules if alias.is_alias(name)]:
        del sys.modules[name]
    assert importlib.util.find_spec("accelerate") is not None
    assert importlib.util.find_spec("accelerate.utils") is not None
    importlib.import_module("accelerate.utils")
    assert importlib.util.find_spec("accelerate") is not None
    assert importlib.util.find_spec("accelerate.nothing") is None
    assert importlib.util.find_spec("accelerated") is None


def test_the_metadata_says_the_version_that_is_answered_for() -> None:
    assert importlib.metadata.version("accelerate") == "1.15.0"
    assert importlib.metadata.metadata("Accelerate")["Name"] == "accelerate"
    distribution = importlib.metadata.distribution("accelerate")
    assert distribution.files is None
    assert list(distribution.entry_points) == []
    assert importlib.metadata.packages_distributions()["accelerate"] == ["accelerate"]
    assert "accelerate" in {found.metadata["Name"] for found in importlib.metadata.distributions()}


def test_a_folder_on_disk_has_no_such_distribution(tmp_path: Path) -> None:
    assert list(importlib.metadata.distributions(name="accelerate", path=[str(tmp_path)])) == []
    assert importlib.metadata.version("pytest")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("accelerate-not-there")


def test_an_unbuilt_name_says_so_under_this_name_too() -> None:
    unbuilt = next(
        (name for name, home in names.exports(names.API + ".utils").items() if home.module is None), None
    )
    if unbuilt is None:
        pytest.skip("every name of accelerate.utils is built")
    with pytest.raises(ImportError, match="does not build it yet"):
        exec(f"from accelerate.utils import {unbuilt}")


def test_old_pickles_that_name_its_modules_can_be_read() -> None:
    from acc_ops.enums import PrecisionType

    old = b"caccelerate.utils.dataclasses\nPrecisionType\n(S'bf16'\ntR."
    assert pickle.loads(old) is PrecisionType.BF16


def test_installing_twice_changes_nothing() -> None:
    before = list(sys.meta_path)
    acc_compat.install()
    acc_compat.install(force=True)
    assert sys.meta_path == before
    assert sum(isinstance(found, alias.AliasFinder) for found in before) == 1


def test_uninstall_takes_the_name_back(python) -> None:
    code = """
import sys, types, acc_compat
other = sys.modules["accelerate"] = types.ModuleType("accelerate")
acc_compat.install(force=True)
import accelerate.utils
assert accelerate is not other
acc_compat.uninstall()
acc_compat.uninstall()
assert sys.modules["accelerate"] is other and "accelerate.utils" not in sys.modules
assert acc_compat.installed() is None
import importlib.metadata
try:
    importlib.metadata.version("accelerate")
except importlib.metadata.PackageNotFoundError:
    print("gone")
"""
    run = python("-c", code)
    assert run.stdout == "gone\n", run.stderr


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """A folder with another package of that name, as if it were installed."""
    folder = tmp_path / "site" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = 'another'\n")
    return folder.parent


TRY = """
import sys, acc_compat
if {imported}: import accelerate
try:
    acc_compat.install(force={force})
except acc_compat.NameTakenError as error:
    print("refused:", error)
import accelerate
print(accelerate.__version__)
"""


@pytest.mark.parametrize("imported", [False, True])
def test_another_package_of_the_name_is_not_replaced_unasked(python, another: Path, imported: bool) -> None:
    run = python("-c", TRY.format(imported=imported, force=False), PYTHONPATH=str(another))
    refusal, version = run.stdout.splitlines()
    assert str(another) in refusal
    assert "force" in refusal
    assert version == "another"


@pytest.mark.parametrize("imported", [False, True])
def test_another_package_of_the_name_is_replaced_when_forced(python, another: Path, imported: bool) -> None:
    run = python("-c", TRY.format(imported=imported, force=True), PYTHONPATH=str(another))
    assert run.stdout == "1.15.0\n", run.stderr


def test_a_bare_folder_of_the_name_is_not_taken_for_a_package(python, tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    run = python("-c", TRY.format(imported=False, force=False), cwd=tmp_path)
    assert run.stdout == "1.15.0\n", run.stderr
