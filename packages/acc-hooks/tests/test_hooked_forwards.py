"""Forwards that are no functions of the module."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

from acc_hooks import ModelHook, add_hook_to_module, remove_hook_from_module


class AddsOne(ModelHook):
    def post_forward(self, module, output):
        return output + 1


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def times(self, x, by):
        return x * by * self.factor


class Static(Base):
    @staticmethod
    def forward(x, by=2.0):
        return x * by


class OfTheClass(Base):
    @classmethod
    def forward(cls, x, by=2.0):
        return x * by * len(cls.__mro__[-1].__name__)


class Partial(Base):
    forward = functools.partialmethod(Base.times, by=2.0)


class Property(Base):
    @property
    def forward(self):
        return lambda x: self.times(x, 2.0)


class Callable:
    def __call__(self, x, by=2.0):
        return x * by


class AnObject(Base):
    forward = Callable()


@pytest.mark.parametrize("kind", [Static, OfTheClass, Partial, Property, AnObject])
@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_forward_that_is_no_function_of_the_module_runs_as_in_torch(kind, copier):
    module, x = kind(), torch.ones(2)
    shown, expected = inspect.signature(module.forward), module(x) + 1
    add_hook_to_module(module, AddsOne())
    module = copier(module)
    assert torch.equal(module(x), expected)
    assert torch.equal(module._old_forward(x) + 1, expected)
    if kind is not Property:
        assert list(inspect.signature(module.forward).parameters) == list(shown.parameters)
    remove_hook_from_module(module)
    assert type(module) is kind
    assert torch.equal(module(x) + 1, expected)


def test_scripting_a_hooked_model_is_refused_with_the_way_out(net, offloaded):
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile hooks"):
        torch.jit.script(offloaded(net()))
