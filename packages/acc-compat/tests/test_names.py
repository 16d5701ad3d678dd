"""Tests of the table of names."""

from __future__ import annotations

import importlib
import inspect

import pytest

from acc_compat import names
from acc_compat.names import API, Home

BUILT = sorted({home for shown in names.modules().values() for home in shown.values() if home.module})


def test_the_table_has_the_modules_that_downstream_libraries_import() -> None:
    for module in ("", ".utils", ".utils.operations", ".hooks", ".commands.launch", ".test_utils"):
        assert API + module in names.modules()
    assert len(BUILT) > 100


@pytest.mark.parametrize("home", BUILT, ids=lambda home: home.public)
def test_every_location_in_the_table_resolves_to_what_is_defined_there(home: Home) -> None:
    value = getattr(importlib.import_module(str(home.module)), home.attribute)
    if inspect.isclass(value) or inspect.isfunction(value):
        # not merely imported there: what is assigned to a home must be met by the code beside the definition
        assert value.__module__ == home.module


def test_a_name_that_a_package_exports_is_not_called_unbuilt() -> None:
    exported: dict[str, str] = {}
    for package in sorted(names.packages()):
        for name in importlib.import_module(package).__all__:
            exported[name] = package
    elsewhere = {home.name for home in BUILT}  # two modules of the interface define prepare_data_loader
    forgotten = {
        f"{home.public}: exported by {exported[home.name]}, but names.txt has `-`"
        for module, shown in names.modules().items()
        for home in shown.values()
        if home.module is None and home.name in exported.keys() - elsewhere and ".test_utils" not in module
    }
    assert not forgotten


def test_all_doors_of_a_name_lead_to_one_home() -> None:
    shown = names.modules()
    assert shown[API + ".utils"]["gather"] is shown[API + ".utils.operations"]["gather"]
    assert shown[API]["Accelerator"].owner == API + ".accelerator"
    renamed = shown[API + ".utils"]["megatron_lm_prepare_data_loader"]
    assert (renamed.owner, renamed.name) == (API + ".utils.megatron_lm", "prepare_data_loader")


def test_a_table_is_read_with_comments_continued_lines_and_other_names() -> None:
    table = names.parse(
        "# nothing\n[.]\nfrom utils: a,\n    b as c   # the same\n\n[utils]\na  acc_ops.x:real\nb  -\n"
    )
    assert table[API]["a"] == Home(API + ".utils", "a", "acc_ops.x", "real")
    assert table[API]["c"] == Home(API + ".utils", "b", None, "b")
    assert table[API]["c"].public == "accelerate.utils.b"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[utils]\na\n", "line 2"),
        ("a acc_ops.x\n", "line 1"),
        ("[utils]\na acc_ops.x too many\n", "too many"),
        ("[utils]\nfrom other: a\n", "does not define a"),
    ],
)
def test_a_line_that_is_not_understood_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        names.parse(text)


def test_submodules_are_those_directly_below() -> None:
    assert "operations" in names.submodules(API + ".utils")
    assert "utils" in names.submodules(API)
    assert "operations" not in names.submodules(API)
    assert names.submodules(API + ".hooks") == []
    assert names.exports("acc_compat.api.nowhere") == {}
