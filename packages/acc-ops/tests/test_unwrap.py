"""Out of the wrappers."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

from acc_ops import unwrap
from acc_ops.regions import compile_regions, is_compiled_module
from acc_ops.unwrap import extract_model_from_parallel, register_unwrap_finalizer, register_wrapper


def compiled(model):
    return torch.compile(model, backend="eager")


class Engine(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    monkeypatch.setattr(unwrap, "_WRAPPERS", dict(unwrap._WRAPPERS))
    monkeypatch.setattr(unwrap, "_FINALIZERS", {})


def test_a_bare_model_is_itself():
    model = nn.Linear(2, 2)
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(None) is None


def test_wrappers_come_off_at_any_depth():
    model = nn.Linear(2, 2)
    assert extract_model_from_parallel(nn.DataParallel(nn.DataParallel(model))) is model


def test_a_model_whose_own_part_is_called_module_keeps_it():
    model = nn.Sequential()
    model.module = nn.Linear(2, 2)
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model, recursive=True).module is model.module


def test_an_engine_can_register_its_wrapper():
    model = nn.Linear(2, 2)
    assert isinstance(extract_model_from_parallel(Engine(model)), Engine)
    register_wrapper(Engine, "inside")
    assert extract_model_from_parallel(Engine(model)) is model

    class Derived(Engine):
        pass

    assert extract_model_from_parallel(Derived(model)) is model


def test_the_compiled_shell_stays_unless_told_otherwise():
    model = nn.Linear(2, 2)
    shell = compiled(model)
    assert extract_model_from_parallel(shell) is shell
    assert extract_model_from_parallel(shell, keep_torch_compile=False) is model
    assert extract_model_from_parallel(nn.DataParallel(shell)) is shell


def test_a_shell_around_a_wrapper_is_put_around_the_model_and_the_old_one_stays_whole():
    model = nn.Linear(2, 2)
    parallel = nn.DataParallel(model)
    shell = compiled(parallel)
    unwrapped = extract_model_from_parallel(shell)
    assert is_compiled_module(unwrapped)
    assert unwrapped._orig_mod is model
    assert shell._orig_mod is parallel
    x = torch.randn(3, 2)
    torch.testing.assert_close(unwrapped(x), model(x))


def test_regionally_compiled_models_come_back_too():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    regional = compile_regions(model, backend="eager")
    assert extract_model_from_parallel(nn.DataParallel(regional)) is regional
    assert extract_model_from_parallel(nn.DataParallel(regional), keep_torch_compile=False) is model


def test_recursive_unwraps_the_parts():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(nn.DataParallel(nn.DataParallel(inner))))
    assert extract_model_from_parallel(model)[0][0] is not inner
    assert extract_model_from_parallel(model, recursive=True)[0][0] is inner


def wrap_forward(model):
    """What a precision does: replace forward, keep the old one."""
    original = model._original_forward = model.forward
    model.forward = MethodType(lambda self, *args: original(*args) + 1, model)
    return original


def test_the_original_forward_comes_back():
    model = nn.Linear(2, 2)
    x = torch.randn(1, 2)
    expected = model(x)
    wrap_forward(model)
    assert not torch.equal(model(x), expected)
    assert extract_model_from_parallel(model) is model
    assert not torch.equal(model(x), expected)
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    torch.testing.assert_close(model(x), expected)
    assert "forward" not in vars(model)
    assert not hasattr(model, "_original_forward")


def test_a_hooked_forward_is_not_bound_twice():
    model = nn.Linear(2, 2)
    model.forward = MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model)
    hooked = model.forward
    wrap_forward(model)
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    x = torch.randn(1, 2)
    torch.testing.assert_close(model(x), nn.Linear.forward(model, x) * 2)
    assert model.forward == hooked


def test_finalizers_run_for_marked_models_only():
    reverted = []
    register_unwrap_finalizer("_converted", reverted.append)
    model = nn.Linear(2, 2)
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert reverted == []
    model._converted = True
    extract_model_from_parallel(model)
    assert reverted == []
    extract_model_from_parallel(nn.DataParallel(model), keep_fp32_wrapper=False)
    assert reverted == [model]
