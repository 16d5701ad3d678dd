"""How much work a hook adds to a call, counted in function calls: what a benchmark would measure, on any machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    set_module_tensor_to_device,
)
from acc_ops.testing import count_calls


class Takes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x, mask=None, cache=None, flag=False):
        return super().forward(x)


def extra_calls(hook: ModelHook, *args, **kwargs) -> int:
    """What the hook adds to the number of calls."""
    plain, hooked = (Takes().requires_grad_(False) for _ in range(2))
    add_hook_to_module(hooked, hook)
    with torch.no_grad():
        hooked(*args, **kwargs)
        return count_calls(lambda: hooked(*args, **kwargs)) - count_calls(lambda: plain(*args, **kwargs))


@pytest.mark.parametrize(
    ("hook", "most"),
    [
        (ModelHook(), 1),
        (AlignDevicesHook("cpu"), 2),
        (AlignDevicesHook("cpu", io_same_device=True), 3),
        (SequentialHook(ModelHook(), ModelHook()), 2),
        (SequentialHook(AlignDevicesHook("cpu"), AlignDevicesHook("cpu")), 4),
        (LayerwiseCastingHook(torch.bfloat16, torch.float32, False), 30),
    ],
)
def test_a_call_with_one_tensor_that_is_there_costs_a_few_calls(hook, most, x):
    assert extra_calls(hook, x) <= most


def test_four_arguments_cost_no_more_than_a_walk_over_them(x):
    arguments = {"mask": torch.ones(4), "cache": None, "flag": False}
    assert extra_calls(AlignDevicesHook("cpu"), x, **arguments) <= 5
    assert extra_calls(AlignDevicesHook("cpu", io_same_device=True), x, **arguments) <= 6


def test_a_leaf_of_nested_arguments_costs_no_call_of_its_own(x):
    def extra(count: int) -> int:
        return extra_calls(AlignDevicesHook("cpu"), x, cache={i: torch.ones(1) for i in range(count)})

    assert extra(200) == extra(2)


def test_setting_a_tensor_costs_a_few_calls():
    layer, value = nn.Linear(4, 4), torch.ones(4, 4)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert (
        count_calls(lambda: set_module_tensor_to_device(layer, "weight", torch.device("cpu"), value=value))
        <= 40
    )
