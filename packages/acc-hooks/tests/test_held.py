from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    OffloadedWeightError,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    remove_hook_from_module,
)


def test_a_weight_assigned_while_offloaded_is_used_and_stays_the_users(x, offload):
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    expected = layer(x)
    offload(layer)
    placeholder, mine = layer.weight, nn.Parameter(torch.eye(4))
    layer.weight = mine
    for _ in range(2):
        torch.testing.assert_close(layer(x), x)
        assert layer.weight is mine
    assert torch.equal(layer.state_dict()["weight"], mine)
    layer(x).sum().backward()
    assert mine.grad is not None
    layer.weight = placeholder  # taken away again
    torch.testing.assert_close(layer(x), expected)
    layer.weight = mine
    remove_hook_from_module(layer)
    assert layer.weight is mine


def test_an_assigned_weight_comes_along_to_the_device_and_back(x):
    layer = add_hook_to_module(
        nn.Linear(4, 4, bias=False), AlignDevicesHook("meta", offload=True, io_same_device=False)
    )
    layer.weight = mine = nn.Parameter(torch.eye(4))
    assert layer(x).is_meta
    assert layer.weight is mine


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("map_kind", ["memory", "read_only"])
def test_a_functional_call_lends_its_weights_for_that_call_only(x, parameters, map_kind, read_only):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)
    plain = copy.deepcopy(model)
    given = {name: value * 2 for name, value in plain.state_dict().items()}
    if parameters:
        given = {name: nn.Parameter(value) for name, value in given.items()}
    expected = torch.func.functional_call(plain, given, (x,))
    weights = read_only(model.state_dict()) if map_kind == "read_only" else None
    weights = weights or {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    lent = dict(given)
    for _ in range(2):
        output = torch.func.functional_call(model, lent, (x,))
        torch.testing.assert_close(output, expected)
        assert all(lent[name] is given[name] for name in given)
        torch.testing.assert_close(model(x), plain(x))
    if parameters:
        output.sum().backward()
        assert given["0.weight"].grad is not None


def test_a_weight_deleted_while_offloaded_is_not_missed(x, offload):
    layer = offload(nn.Linear(4, 4))
    del layer.bias
    layer.bias = torch.zeros(4)
    assert layer(x).shape == (2, 4)


@pytest.mark.parametrize("keep", ["writable", "read_only"])
def test_a_change_is_seen_though_the_map_has_another_dtype(keep, request):
    kind = request.getfixturevalue(keep)
    layer = nn.Linear(2, 2).requires_grad_(False)
    weights = kind({name: value.bfloat16() for name, value in layer.state_dict().items()})
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with align_module_device(layer):
        pass  # nothing changed: nothing is written
    if keep == "read_only":
        with pytest.raises(OffloadedWeightError, match="read-only"), align_module_device(layer):
            layer.weight.data.fill_(7.0)
        return
    with align_module_device(layer):
        layer.weight.data.fill_(7.0)
    assert (layer.state_dict()["weight"] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_running_statistics_go_home_to_a_map_of_another_dtype(dtype):
    norm, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    weights = {k: v.to(dtype) if v.is_floating_point() else v for k, v in norm.state_dict().items()}
    hook = AlignDevicesHook("cpu", offload=True, offload_buffers=True, weights_map=weights)
    add_hook_to_module(norm.requires_grad_(False), hook)
    x = torch.randn(8, 4) + 5
    for _ in range(3):
        norm(x), plain(x)
    assert torch.equal(norm.state_dict()["running_mean"], plain.running_mean)
