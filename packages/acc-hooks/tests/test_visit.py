from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    OffloadedWeightError,
    PrefixedDataset,
    add_hook_to_module,
    align_module_device,
    has_offloaded_params,
)

META = torch.device("meta")  # plays a second device
CPU = torch.device("cpu")


def test_offloaded_weights_are_real_inside_of_the_context(raising, offload):
    scale = raising.scale.detach().clone()
    offload(raising, place_submodules=False)
    with align_module_device(raising):
        assert torch.equal(raising.scale, scale)
    assert raising.scale.device == META


def test_the_context_sees_a_hook_in_a_chain():
    layer = nn.Linear(4, 4)
    expected = layer.weight.detach().clone()
    add_hook_to_module(layer, AlignDevicesHook(io_same_device=True))
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True), append=True)
    assert has_offloaded_params(layer)
    with align_module_device(layer, "cpu"):
        assert torch.equal(layer.weight, expected)
    assert not has_offloaded_params(nn.Linear(2, 2))
    assert not has_offloaded_params(add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu")))


def test_another_device_can_be_asked_for_and_is_forgotten_afterwards(x, offload):
    layer = offload(nn.Linear(4, 4))
    expected = layer(x)
    with align_module_device(layer, "meta"):
        assert layer.weight.device == META
    torch.testing.assert_close(layer(x), expected)


def change(how, module):
    with torch.no_grad():
        if how == "in place":
            module.weight.add_(1)
        elif how == "by data":
            module.weight.data.add_(1)
        elif how == "by setting data":
            module.weight.data = module.weight.data + 1
        else:
            module.weight = nn.Parameter(module.weight + 1)


HOWS = ["in place", "by data", "by setting data", "assigned"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["memory", "store"])
def test_what_is_changed_inside_is_kept(how, kind, x, offload, writable):
    layer = nn.Linear(4, 4)
    expected = layer(x) + x.sum(1, keepdim=True)
    weights = writable(layer.state_dict()) if kind == "store" else None
    model = nn.Sequential(layer)
    if weights is not None:
        offload(layer, weights_map=PrefixedDataset(PrefixedDataset(weights, ""), ""))
    else:
        offload(layer)
    with align_module_device(layer):
        change(how, layer)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(layer.state_dict()["weight"], layer._hf_hook.weights_map["weight"].detach())


@pytest.mark.parametrize("how", HOWS)
def test_what_a_read_only_store_would_lose_is_an_error(how, x, offload, read_only):
    layer = nn.Linear(4, 4)
    expected = layer(x)
    offload(layer, weights_map=read_only(layer.state_dict()))
    with pytest.raises(OffloadedWeightError, match="weight was changed"):
        with align_module_device(layer):
            change(how, layer)
    torch.testing.assert_close(layer(x), expected)


def test_reading_from_a_read_only_store_is_no_change(offload, read_only):
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    weights = read_only(before)
    offload(layer, weights_map=weights)
    with align_module_device(layer):
        assert layer.weight.sum().isnan()
    for name, value in before.items():
        torch.testing.assert_close(weights[name], value, equal_nan=True)
    assert layer.weight.is_meta


def test_an_exception_inside_of_the_context_leaves_the_module_offloaded(offload):
    layer = offload(nn.Linear(4, 4))
    with pytest.raises(KeyError), align_module_device(layer):
        raise KeyError
    assert layer.weight.device == META


def test_a_module_that_is_not_offloaded_goes_to_the_device_and_comes_back():
    layer = nn.BatchNorm1d(4)
    weight, mean = layer.weight, layer.running_mean
    with align_module_device(layer, "meta"):
        assert layer.weight.device == layer.running_mean.device == META
    assert layer.weight is weight
    assert layer.running_mean is mean
    with align_module_device(layer):
        assert layer.weight is weight


def test_two_devices_at_once_are_refused(offload):
    layer = offload(nn.Linear(4, 4))
    with align_module_device(layer, "cpu"):
        with pytest.raises(OffloadedWeightError, match="in use on cpu"):
            with align_module_device(layer, "meta"):
                pass
    assert layer.weight.device == META


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_child_of_a_block_that_is_loaded_whole_has_its_weights_in_a_visit(device, offloaded, writable):
    model = nn.Sequential(nn.MultiheadAttention(4, 2)).requires_grad_(False)
    expected = model[0].out_proj.weight.clone()
    weights = writable(model.state_dict())
    offloaded(model, weights_map=weights)
    child = model[0].out_proj
    placeholder = child.weight
    with align_module_device(child, device):
        assert torch.equal(child.weight, expected)
        assert type(child.weight) is nn.Parameter
        child.weight.data.fill_(7.0)
        child.bias = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
    assert child.weight is placeholder
    assert (weights["0.out_proj.weight"] == 7).all()
    assert (weights["0.out_proj.bias"] == 3).all()
