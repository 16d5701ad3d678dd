"""Tests of the modules below acc_compat.api."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest

import acc_compat
from acc_compat import finder, names
from acc_compat.names import API


@pytest.mark.parametrize("module", sorted(names.modules()))
def test_every_module_of_the_table_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__name__ == module
    assert found.__spec__ is not None
    assert found.__spec__.submodule_search_locations == []


def test_a_module_that_the_interface_does_not_have_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(API + ".utils.nothing")
    assert importlib.util.find_spec(API + ".utils.nothing") is None


def test_there_is_one_finder_however_often_it_is_registered() -> None:
    finder.register()
    importlib.reload(acc_compat)
    assert sum(isinstance(found, finder.ApiFinder) for found in sys.meta_path) == 1


def test_the_interface_has_the_version_it_answers_for() -> None:
    import acc_compat.api

    assert acc_compat.api.__version__ == names.INTERFACE_VERSION


def test_importing_the_interface_imports_no_torch(python) -> None:
    run = python("-c", "import acc_compat.api.utils, sys; sys.exit('torch' in sys.modules)")
    assert run.returncode == 0, run.stderr


def test_importing_the_package_reads_no_table(python) -> None:
    run = python(
        "-c", "import acc_compat, sys; sys.exit('acc_compat.api' in sys.modules or 'inspect' in sys.modules)"
    )
    assert run.returncode == 0, run.stderr


def test_every_module_says_which_file_it_is_made_from() -> None:
    import acc_compat.api.utils.operations as operations

    assert operations.__file__ == names.__file__
    assert inspect.getsourcefile(operations) == names.__file__
