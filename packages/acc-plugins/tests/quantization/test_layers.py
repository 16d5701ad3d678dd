"""quantization/layers.py: which layers may be given few bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_plugins.quantization.layers import (
    get_keys_to_not_convert,
    get_parameter_device,
    is_named,
    linear_layers,
)


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        if tie:
            self.head.weight = self.emb.weight


class Based(nn.Module):
    base_model_prefix = "model"

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        setattr(self, "model" if whole else "layers", Tied(tie=False))
        self.lm_head = nn.Linear(4, 4)


def test_shared_weights_and_the_last_child_stay_as_they_are() -> None:
    assert get_keys_to_not_convert(Tied(tie=True)) == ["emb", "head"]
    assert get_keys_to_not_convert(Tied(tie=False)) == ["head"]
    assert get_keys_to_not_convert(Based(whole=True)) == ["lm_head"]


def test_shared_weights_are_known_of_an_empty_model_too() -> None:
    with torch.device("meta"):
        assert get_keys_to_not_convert(Tied(tie=True)) == ["emb", "head"]


def test_an_untied_base_model_has_nothing_to_leave_out() -> None:
    assert get_keys_to_not_convert(Based(whole=False)) == []


def test_the_device_is_that_of_the_first_parameter() -> None:
    assert get_parameter_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    with pytest.raises(ValueError, match="ReLU has no parameter"):
        get_parameter_device(nn.ReLU())


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("a.body.0", "body", True),
        ("a.body.0", "body.0", True),
        ("a.body2.0", "body", False),
        ("a.body.01", "body.0", False),
        ("body", "body", True),
    ],
)
def test_a_name_is_whole_parts_of_a_path(path: str, name: str, found: bool) -> None:
    assert is_named(path, ["other", name]) is found


def test_only_layers_of_the_exact_class_are_found_under_each_of_their_names() -> None:
    class Own(nn.Linear):
        pass

    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": layer, "own": Own(2, 2), "act": nn.ReLU()})
    assert linear_layers(model) == {"a": layer, "b": layer}
    assert linear_layers(model, ["top.a"], below="top") == {"b": layer}
