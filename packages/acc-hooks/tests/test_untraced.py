from __future__ import annotations

import sys

import pytest
import torch

from acc_hooks import untraced


@pytest.fixture
def without_dynamo(monkeypatch):
    monkeypatch.setattr(untraced, "_disabled", None)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)


def test_a_call_gets_its_arguments_and_gives_its_result():
    assert untraced.untraced(lambda *args, **kwargs: (args, kwargs), 1, a=2) == ((1,), {"a": 2})


def test_without_dynamo_the_function_is_called_and_nothing_else(without_dynamo, monkeypatch):
    monkeypatch.setattr(torch.compiler, "disable", None)
    assert untraced.untraced(max, 1, 2) == 2
    assert untraced._disabled is None


def test_an_error_of_the_function_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        untraced.untraced(lambda: 1 / 0)
