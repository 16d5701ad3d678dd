"""Tests of a module of the interface: one value behind many doors."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acc_compat.api as api
import acc_compat.api.utils as utils
import acc_compat.api.utils.environment as environment
import acc_ops.environment
import acc_ops.optional
from acc_compat import NotBuiltError, names
from acc_compat.names import API


@pytest.fixture
def unbuilt() -> str:
    """A name below utils that is not built yet, whichever that is today."""
    for name, home in names.exports(API + ".utils").items():
        if home.module is None and home.name == name:
            return name
    pytest.skip("every name of accelerate.utils is built")


@pytest.fixture
def holder() -> Iterator[types.ModuleType]:
    """A module of ours that holds str_to_bool by `from acc_ops.environment import str_to_bool`."""
    module = types.ModuleType("acc_ops.holder_for_a_test")
    vars(module)["str_to_bool"] = acc_ops.environment.str_to_bool
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_reading_gives_the_object_of_the_module_that_defines_it() -> None:
    assert environment.str_to_bool is acc_ops.environment.str_to_bool
    assert utils.str_to_bool is acc_ops.environment.str_to_bool
    assert utils.environment is environment
    assert "str_to_bool" not in vars(utils)


def test_assigning_reaches_every_door_and_whoever_holds_the_name(
    monkeypatch: pytest.MonkeyPatch, holder: types.ModuleType
) -> None:
    def other(value: str) -> int:
        return 7

    before = acc_ops.environment.str_to_bool
    monkeypatch.setattr(utils, "str_to_bool", other)
    assert acc_ops.environment.str_to_bool is other
    assert environment.str_to_bool is other
    assert holder.str_to_bool is other
    monkeypatch.undo()  # deletes, because the name is not in the door's __dict__
    assert utils.str_to_bool is holder.str_to_bool is acc_ops.environment.str_to_bool is before


def test_code_of_ours_meets_the_patched_function() -> None:
    with mock.patch.object(api.utils.imports, "is_boto3_available", return_value="patched"):
        assert acc_ops.optional.is_boto3_available() == "patched"
        assert utils.is_boto3_available() == "patched"
    assert acc_ops.optional.is_boto3_available() in (True, False)


def test_a_helper_patched_where_downstream_libraries_patch_it_is_met_by_dispatch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with mock.patch("acc_compat.api.big_modeling.check_device_map", side_effect=ValueError("patched")):
        with pytest.raises(ValueError, match="patched"):
            api.dispatch_model(model, {"0": "cpu", "1": "cpu"}, force_hooks=True)
    api.dispatch_model(model, {"0": "cpu", "1": "cpu"}, force_hooks=True)


def test_mock_patch_leaves_everything_as_it_was(holder: types.ModuleType) -> None:
    before = acc_ops.environment.str_to_bool
    with mock.patch("acc_compat.api.utils.str_to_bool") as fake:
        assert acc_ops.environment.str_to_bool is holder.str_to_bool is fake
        with mock.patch.object(environment, "str_to_bool") as inner:
            assert utils.str_to_bool is holder.str_to_bool is inner
        assert environment.str_to_bool is holder.str_to_bool is fake
    assert utils.str_to_bool is holder.str_to_bool is acc_ops.environment.str_to_bool is before
    assert "str_to_bool" not in vars(utils)


def test_putting_the_old_value_back_by_hand_is_the_end_of_it(holder: types.ModuleType) -> None:
    before = utils.str_to_bool
    utils.str_to_bool = print
    environment.str_to_bool = len
    utils.str_to_bool = before
    assert environment.str_to_bool is holder.str_to_bool is before
    del utils.str_to_bool  # nothing of the past is left: this one is real
    assert not hasattr(environment, "str_to_bool")
    environment.str_to_bool = before
    assert utils.str_to_bool is holder.str_to_bool is before


def test_a_deleted_name_is_gone_from_every_door() -> None:
    before = acc_ops.environment.str_to_bool
    del utils.str_to_bool
    try:
        assert not hasattr(environment, "str_to_bool")
        assert not hasattr(acc_ops.environment, "str_to_bool")
        with pytest.raises(AttributeError):
            del utils.str_to_bool
    finally:
        utils.str_to_bool = before
    assert environment.str_to_bool is before


def test_an_unbuilt_name_is_absent_and_says_so(unbuilt: str) -> None:
    assert not hasattr(utils, unbuilt)
    assert getattr(utils, unbuilt, 5) == 5
    assert unbuilt not in dir(utils)
    with pytest.raises(NotBuiltError, match=f"{unbuilt} .*does not build it yet") as caught:
        getattr(utils, unbuilt)
    assert isinstance(caught.value, AttributeError)


def test_importing_an_unbuilt_name_tells_our_message(unbuilt: str) -> None:
    with pytest.raises(ImportError, match="does not build it yet") as caught:
        exec(f"from acc_compat.api.utils import {unbuilt}")
    assert isinstance(caught.value, NotBuiltError)


def test_an_unbuilt_name_can_be_given_and_taken_back(unbuilt: str) -> None:
    owner = importlib.import_module(names.exports(API + ".utils")[unbuilt].owner)
    setattr(utils, unbuilt, 3)
    assert getattr(utils, unbuilt) == getattr(owner, unbuilt) == 3
    delattr(utils, unbuilt)
    assert not hasattr(owner, unbuilt)
    with pytest.raises(AttributeError):
        delattr(utils, unbuilt)


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'gather_all'") as caught:
        _ = utils.gather_all
    assert not isinstance(caught.value, NotBuiltError)
    with pytest.raises(ImportError, match="cannot import name"):
        from acc_compat.api.utils import gather_all  # noqa: F401


def test_other_attributes_stay_on_the_door() -> None:
    utils.mark_of_a_test = 1
    assert utils.mark_of_a_test == 1
    assert not hasattr(environment, "mark_of_a_test")
    del utils.mark_of_a_test
    assert not hasattr(utils, "mark_of_a_test")


def test_a_function_keeps_its_name_when_the_submodule_of_that_name_is_imported() -> None:
    import acc_compat.api.utils.tqdm as found  # binds the module, then reads utils.tqdm

    module = importlib.import_module("acc_compat.api.utils.tqdm")
    assert isinstance(module, types.ModuleType)
    assert "tqdm" not in vars(utils)
    if names.exports(API + ".utils")["tqdm"].module is not None:
        assert callable(found)
        assert utils.tqdm is module.tqdm


def test_star_import_brings_the_built_names() -> None:
    space: dict[str, Any] = {}
    exec("from acc_compat.api.utils.environment import *", space)
    assert space["str_to_bool"] is acc_ops.environment.str_to_bool
    assert set(environment.__all__) <= set(space)
    assert all(name in dir(environment) for name in environment.__all__)


def test_dir_and_inspect_see_what_is_built() -> None:
    assert {"operations", "environment", "str_to_bool"} <= set(dir(utils))
    assert not any(name.startswith("__past") for name in dir(utils))
    assert inspect.ismodule(utils)
    assert "def str_to_bool" in inspect.getsource(utils.str_to_bool)
    assert dict(inspect.getmembers(environment, inspect.isfunction))["str_to_bool"]


def test_classes_are_pickled_by_their_real_home() -> None:
    value = utils.PrecisionType("bf16")
    assert pickle.loads(pickle.dumps(value)) is value
    assert utils.PrecisionType.__module__ == "acc_ops.enums"


def test_reload_keeps_the_module_and_what_it_shows() -> None:
    assert importlib.reload(utils) is utils
    assert utils.str_to_bool is acc_ops.environment.str_to_bool
    assert importlib.reload(api).__version__ == "1.15.0"


@given(st.lists(st.tuples(st.sampled_from([utils, environment]), st.booleans()), max_size=8))
def test_nested_patches_show_at_every_door_and_leave_no_trace(steps: list[tuple[Any, bool]]) -> None:
    before = acc_ops.environment.str_to_bool
    with contextlib.ExitStack() as open_patches:
        for value, (door, by_assignment) in enumerate(steps):
            if by_assignment:
                old = door.str_to_bool
                door.str_to_bool = value
                open_patches.callback(setattr, door, "str_to_bool", old)
            else:
                open_patches.enter_context(mock.patch.object(door, "str_to_bool", value))
            assert utils.str_to_bool is environment.str_to_bool is acc_ops.environment.str_to_bool
            assert utils.str_to_bool == value
    assert utils.str_to_bool is environment.str_to_bool is acc_ops.environment.str_to_bool is before
