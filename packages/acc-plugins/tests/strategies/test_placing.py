"""Models on their device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_plugins.strategies.placing import is_dispatched, place

CPU = torch.device("cpu")


class Untouchable(nn.Linear):
    def to(self, *args, **kwargs):
        raise AssertionError("moved")


def test_a_model_that_is_there_is_not_touched() -> None:
    model = Untouchable(2, 2)
    assert place(model, CPU) is model


def test_a_model_elsewhere_is_moved_with_its_buffers() -> None:
    model = nn.BatchNorm1d(2)
    assert place(model, torch.device("meta")) is model
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_a_buffer_alone_is_reason_enough_to_move() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1))
    assert place(model, torch.device("meta")).mask.is_meta


def test_a_weight_on_the_meta_device_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight of Sequential is on the meta device"):
        place(model, CPU)


@pytest.mark.parametrize(
    ("device_map", "dispatched"),
    [
        ({"": 0}, False),
        ({"a": 0, "b": 0}, False),
        ({"a": 0, "b": "cpu"}, True),
        ({"": "disk"}, True),
        (None, False),
    ],
)
def test_a_dispatched_model_keeps_its_places(device_map, dispatched: bool) -> None:
    model = Untouchable(2, 2, device="meta")
    model.hf_device_map = device_map
    assert is_dispatched(model) is dispatched
    if dispatched:
        assert place(model, CPU) is model
