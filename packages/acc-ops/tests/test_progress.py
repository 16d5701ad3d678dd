"""The progress bar, with a tqdm of our own in place of the library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from acc_ops.progress import tqdm
from acc_ops.testing import run_threads


@pytest.fixture(autouse=True)
def _bar(monkeypatch):
    fake = SimpleNamespace(tqdm=lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(auto=fake, __path__=[]))
    monkeypatch.setitem(sys.modules, "tqdm.auto", fake)


def test_only_the_first_rank_of_a_machine_shows_it():
    shown = run_threads(3, lambda: not tqdm([1])[1]["disable"])
    assert shown == [True, False, False]


def test_everybody_shows_it_when_asked_for():
    assert run_threads(2, lambda: tqdm([1], main_process_only=False)) == [(([1],), {})] * 2


def test_disable_wins():
    assert tqdm([1], disable=True) == (([1],), {"disable": True})


def test_a_boolean_first_argument_is_a_mistake():
    with pytest.raises(ValueError, match="main_process_only=True"):
        tqdm(True, [1])


def test_without_the_library_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match='pip install "tqdm"'):
        tqdm([1])
