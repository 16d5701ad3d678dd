from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    add_hook_to_module,
)

META = torch.device("meta")  # plays a second device
CPU = torch.device("cpu")


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


# --- arguments ---------------------------------------------------------------------------------------------------


def test_arguments_go_to_the_execution_device():
    echo = add_hook_to_module(Echo(), AlignDevicesHook(execution_device="meta"))
    args, kwargs = echo(torch.ones(1), [torch.ones(1), 3], name="x", mask={"a": (torch.ones(1),)})
    assert args[0].device == args[1][0].device == kwargs["mask"]["a"][0].device == META
    assert args[1][1] == 3
    assert kwargs["name"] == "x"


def test_skipped_keyword_arguments_stay():
    echo = add_hook_to_module(Echo(), AlignDevicesHook(execution_device="meta", skip_keys=["cache", "past"]))
    _, kwargs = echo(cache=torch.ones(1), mask=torch.ones(1))
    assert kwargs["cache"].device == CPU
    assert kwargs["mask"].device == META


def test_arguments_that_are_there_already_are_the_same_objects():
    echo = add_hook_to_module(Echo(), AlignDevicesHook(execution_device="cpu"))
    nested = {"a": [torch.ones(1)]}
    tensor = torch.ones(1)
    args, kwargs = echo(tensor, nested, cache=nested)
    assert args[0] is tensor
    assert args[1] is nested
    assert kwargs["cache"] is nested


def test_the_output_returns_to_the_device_of_the_input():
    class OnCpu(nn.Module):
        def forward(self, x=None, **kwargs):
            return {"y": [torch.ones(1)]}

    layer = add_hook_to_module(OnCpu(), AlignDevicesHook(io_same_device=True))
    assert layer(torch.ones(1, device=META))["y"][0].device == META
    assert layer(extra=[torch.ones(1, device=META)])["y"][0].device == META
    assert layer(torch.ones(1))["y"][0].device == CPU
    assert layer()["y"][0].device == CPU


def test_io_same_device_may_be_set_later():
    hook = AlignDevicesHook(execution_device="meta")
    echo = add_hook_to_module(nn.Identity(), hook)
    assert echo(torch.ones(1)).device == META
    hook.io_same_device = True
    with pytest.raises(NotImplementedError):
        echo(torch.ones(1))


def test_the_execution_device_may_be_set_later():
    hook = AlignDevicesHook(execution_device="cpu")
    echo = add_hook_to_module(nn.Identity(), hook)
    assert echo(torch.ones(1)).device == CPU
    hook.execution_device = "meta"
    assert echo(torch.ones(1)).device == META


def test_a_mask_given_to_every_layer_travels_once():
    seen = []

    class Layer(nn.Module):
        def forward(self, x, mask=None, pair=None):
            seen.append((mask, pair[0]))
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x, mask, pair):
            for layer in self.layers:
                x = layer(x, mask=mask, pair=pair)
            return x

    net = add_hook_to_module(Net(), AlignDevicesHook(io_same_device=False))
    for layer in net.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="meta"))
    net(torch.ones(2), torch.ones(2), (torch.ones(1), torch.ones(1)))
    assert len({id(mask) for mask, _ in seen}) == 1
    assert len({id(part) for _, part in seen}) == 1
    assert seen[0][0].device == META


def test_a_module_without_tensors_can_be_aligned():
    module = add_hook_to_module(nn.ReLU(), AlignDevicesHook(execution_device="cpu", offload=True))
    assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert module.state_dict() == {}


# --- weights that stay -------------------------------------------------------------------------------------------


def test_attaching_moves_the_modules_own_tensors_or_all():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("b", torch.ones(1))
    add_hook_to_module(model, AlignDevicesHook(execution_device="meta"))
    assert model.b.device == META
    assert model[0].weight.device == CPU
    add_hook_to_module(model, AlignDevicesHook(execution_device="meta", place_submodules=True))
    assert model[0].weight.device == META


def test_a_weight_that_is_there_stays_the_same_object():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    assert layer.weight is weight


def test_ties_inside_a_block_stay_ties(tied):
    add_hook_to_module(tied, AlignDevicesHook(execution_device="meta", place_submodules=True))
    assert tied.head.weight is tied.embed.weight
    assert tied.head.weight.device == META
