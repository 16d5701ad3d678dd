from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module

META = torch.device("meta")  # plays the accelerator: only places matter here


class Where(nn.Module):
    """Says where its argument and its weights are when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[tuple[str, str]] = []

    def forward(self, x, mask=None):
        self.seen.append((x.device.type, self.linear.weight.device.type))
        return mask


def test_the_default_device_is_this_process_own():
    from acc_ops.world import current_world

    assert CpuOffload().execution_device == current_world().device


def test_a_call_brings_model_and_arguments_to_the_device_every_time():
    model = add_hook_to_module(Where(), CpuOffload("meta"))
    assert model.linear.weight.device.type == "cpu"
    for _ in range(2):
        assert model(torch.ones(1), mask=[torch.ones(1)])[0].device == META
    assert model.seen == [("meta", "meta")] * 2
    assert model.linear.weight.device == META


def test_nothing_moves_when_everything_is_there():
    model = add_hook_to_module(Where(), CpuOffload("cpu"))
    weight, mask = model.linear.weight, [torch.ones(1)]
    assert model(torch.ones(1), mask=mask) is mask
    assert model.linear.weight is weight


class Away(nn.Module):
    """A model that can come back from the accelerator that meta plays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x

    def to(self, device):
        self.weight = nn.Parameter(torch.ones(2, device=device))
        return self


def test_a_later_model_sends_the_one_before_it_away():
    first_hook, first = CpuOffload("meta"), Away()
    add_hook_to_module(first, first_hook)
    user = UserCpuOffloadHook(first, first_hook)
    second = add_hook_to_module(Away(), CpuOffload("meta", prev_module_hook=user))
    first(torch.ones(1))
    assert first.weight.device == META
    second(torch.ones(1))
    assert first.weight.device.type == "cpu"
    assert second.weight.device == META


def test_the_user_sends_a_model_away_and_removes_the_hook():
    hook, model = CpuOffload("meta"), Away()
    add_hook_to_module(model, hook)
    user = UserCpuOffloadHook(model, hook)
    model(torch.ones(1))
    user.offload()
    assert model.weight.device.type == "cpu"
    model(torch.ones(1))
    user.remove()
    assert model.weight.device == META
    assert not hasattr(model, "_hf_hook")


def test_a_model_without_tensors_can_be_offloaded():
    model = add_hook_to_module(nn.ReLU(), CpuOffload("meta"))
    assert model(torch.ones(1)).device == META


def test_a_wrong_device_is_refused_at_the_call():
    model = add_hook_to_module(nn.ReLU(), CpuOffload("nowhere"))
    with pytest.raises(ValueError, match="nowhere"):
        model(torch.ones(1))
