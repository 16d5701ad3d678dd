"""Tied parameters by name."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from acc_bigmodel import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from acc_ops.testing import count_calls


def test_groups_are_sorted_and_hold_parameters_only(tied_model: nn.Module) -> None:
    tied_model.layers[2].up = tied_model.layers[0].up
    assert find_tied_parameters(tied_model) == [
        ["embed.weight", "head.weight"],
        ["layers.0.up.bias", "layers.2.up.bias"],
        ["layers.0.up.weight", "layers.2.up.weight"],
    ]


def test_finding_is_linear() -> None:  # case big/64
    def calls(count: int) -> int:
        with torch.device("meta"):
            a = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(count)])
            b = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(count)])
        for x, y in zip(a, b, strict=True):
            y.weight = x.weight
        both = nn.ModuleList([a, b])
        return count_calls(lambda: find_tied_parameters(both))

    assert calls(2000) < 5 * calls(500)


def test_retying_takes_the_first_that_has_values() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False, device="meta"), nn.Linear(2, 2, bias=False)])
    real = model[1].weight
    retie_parameters(model, [["0.weight", "1.weight"]])
    assert model[0].weight is real
    assert model[1].weight is real


def test_retying_without_any_value_changes_nothing(empty_model: nn.Module) -> None:
    before = empty_model.head.weight
    retie_parameters(empty_model, [["embed.weight", "head.weight"]])
    assert empty_model.head.weight is before


def test_a_group_on_two_devices_is_said(caplog: pytest.LogCaptureFixture) -> None:
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"": 0})
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": "cuda:0"})
    assert not caplog.text
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": "cpu"})
    assert "a.w on 0, b.w on cpu" in caplog.text
    with pytest.raises(ValueError, match=r"'b\.w'"):
        check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0})


def test_a_config_may_say_that_weights_are_tied(tied_model: nn.Module) -> None:
    assert not check_tied_parameters_in_config(tied_model)
    tied_model.config = types.SimpleNamespace(tie_word_embeddings=True)
    assert not check_tied_parameters_in_config(tied_model)
    tied_model.get_output_embeddings = lambda: tied_model.head
    assert check_tied_parameters_in_config(tied_model)
    tied_model.config = types.SimpleNamespace(tie_encoder_decoder=True)
    assert check_tied_parameters_in_config(tied_model)


def test_a_model_says_that_it_ties_by_a_method_of_a_part_too() -> None:
    class Tying(nn.Linear):
        def _tie_weights(self) -> None:
            pass

    assert not check_tied_parameters_in_config(nn.Sequential(nn.Linear(2, 2)))
    assert check_tied_parameters_in_config(nn.Sequential(Tying(2, 2)))


def test_the_config_of_the_text_part_counts(tied_model: nn.Module) -> None:
    text = types.SimpleNamespace(tie_word_embeddings=True)
    tied_model.config = types.SimpleNamespace(get_text_config=lambda decoder: text)
    tied_model.get_output_embeddings = lambda: tied_model.head
    assert check_tied_parameters_in_config(tied_model)
    tied_model.get_output_embeddings = lambda: None
    assert not check_tied_parameters_in_config(tied_model)
