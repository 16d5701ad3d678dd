from __future__ import annotations

import types

import torch

from acc_hooks import PrefixedDataset
from acc_hooks.prefixed import innermost, is_at_hand, is_writable, lacks


def test_a_view_looks_under_its_prefix():
    data = {"a.x": torch.ones(1), "a.y": torch.zeros(1), "b.x": torch.zeros(1)}
    view = PrefixedDataset(data, "a.")
    assert view["x"] is data["a.x"]
    assert list(view) == ["a.x", "a.y"]
    assert len(view) == 3
    assert "x" in view
    assert "z" not in view
    assert (view.dataset, view.prefix) == (data, "a.")


def test_views_of_views_reach_the_map_and_write_to_it():
    data = {"a.b.x": torch.ones(1)}
    view = PrefixedDataset(PrefixedDataset(data, "a."), "b.")
    assert innermost(view) is data
    view["x"] = torch.zeros(1)
    assert not data["a.b.x"].any()


def test_a_read_only_map_is_known_as_one():
    assert is_writable(PrefixedDataset({}, "a."))
    assert not is_writable(PrefixedDataset(types.MappingProxyType({}), "a."))


def test_a_map_is_not_read_to_find_out_what_it_lacks():
    class Reading(torch.nn.ParameterDict):
        pass

    from collections.abc import Mapping

    class Lazy(Mapping):
        def __getitem__(self, key):
            raise AssertionError("read")

        def __iter__(self):
            return iter(())

        def __len__(self):
            return 0

    assert lacks(Lazy(), "x") is False
    assert lacks({}, "x") is True


def test_a_dict_is_at_hand_and_other_maps_are_asked():
    class Default(dict):
        def __missing__(self, key):
            raise AssertionError("read")

    class Says(dict):
        def __getitem__(self, key):
            raise AssertionError("read")

        def is_at_hand(self, key):
            return key == "near"

    assert is_at_hand({}, "x") is True
    assert is_at_hand(Default(), "x") is None
    assert is_at_hand(Says(), "near") is True
    assert is_at_hand(Says(), "far") is False
    assert is_at_hand(types.MappingProxyType({}), "x") is None
