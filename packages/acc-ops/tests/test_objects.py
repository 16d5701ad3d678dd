"""Small helpers."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from acc_ops.objects import ThreadLocalSharedDict, do_nothing, get_pretty_name, merge_dicts, recursive_getattr


def test_a_dotted_path_is_followed():
    inner = SimpleNamespace(value=3)
    assert recursive_getattr(SimpleNamespace(a=SimpleNamespace(b=inner)), "a.b.value") == 3
    with pytest.raises(AttributeError, match="c"):
        recursive_getattr(SimpleNamespace(a=inner), "a.c.value")


class Named:
    def method(self):
        """Nothing."""


def test_pretty_names():
    assert get_pretty_name(Named) == "Named"
    assert get_pretty_name(Named()) == "Named"
    assert get_pretty_name(Named.method) == "Named.method"
    assert get_pretty_name(SimpleNamespace(__name__="given")) == "given"


def test_merging_is_deep_and_in_place():
    destination = {"a": {"x": 1, "y": 2}, "b": 3, "c": 4}
    merged = merge_dicts({"a": {"x": 9, "z": {"deep": 1}}, "b": {"now": "a dict"}}, destination)
    assert merged is destination
    assert merged == {"a": {"x": 9, "y": 2, "z": {"deep": 1}}, "b": {"now": "a dict"}, "c": 4}


def test_merging_does_not_tie_the_destination_to_the_source():
    source = {"a": {"x": 1}}
    merged = merge_dicts(source, {})
    merged["a"]["x"] = 2
    assert source == {"a": {"x": 1}}


def test_nothing_is_done_with_anything():
    assert do_nothing(1, key=2) is None


def test_each_thread_has_its_own_dictionary():
    class Shared:
        state = ThreadLocalSharedDict()

    Shared().state["rank"] = 0
    seen = []
    thread = threading.Thread(target=lambda: seen.append(dict(Shared().state)))
    thread.start()
    thread.join()
    assert seen == [{}]
    assert Shared().state == {"rank": 0}
    Shared().state = {"rank": 5}
    assert Shared().state == {"rank": 5}
