from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    OffloadedWeightError,
    add_hook_to_module,
    align_module_device,
    remove_hook_from_module,
)
from acc_hooks.placeholder import is_placeholder


def test_a_placeholder_tells_what_the_weight_is(net, offloaded):
    model = net()
    model[0].weight.note = "mine"
    plain = model[0].weight
    weight = offloaded(model)[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_meta
    assert weight.device.type == "meta"
    assert (weight.shape, weight.dtype, weight.stride()) == (plain.shape, plain.dtype, plain.stride())
    assert (weight.numel(), weight.element_size(), weight.nbytes, len(weight)) == (16, 4, 64, 4)
    assert (weight.is_contiguous(), weight.is_floating_point(), weight.is_leaf) == (True, True, True)
    assert weight.grad is None
    assert weight.note == "mine"
    assert weight.data_ptr() == 0
    assert weight in {weight}
    assert "offloaded '0.weight'" in repr(weight)
    assert f"{weight}" == str(weight) == repr(weight)
    assert weight.requires_grad_(True).requires_grad
    assert is_placeholder(weight.detach())
    assert not weight.detach().requires_grad


def test_copying_into_a_placeholder_takes_effect(x, net, offloaded):
    model, other = offloaded(net()), net()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.mul_(3)
        mine.copy_(theirs)
    torch.testing.assert_close(model(x), other(x))
    model[0].weight.data = torch.eye(4)
    assert torch.equal(model.state_dict()["0.weight"], torch.eye(4))
    with pytest.raises(OffloadedWeightError, match=r"0\.weight"):
        model[0].weight.data = torch.ones(2, 2)
    assert model[0].weight.is_meta


def test_a_value_of_another_dtype_takes_its_dtype_along(x, net, offloaded, writable):
    plain, model = net(), net()
    weights = writable(model.state_dict())
    offloaded(model, weights_map=weights)
    for weight in (plain[2].weight, model[2].weight):
        weight.data = weight.data.double() * 2
        assert weight.dtype is torch.float64
    assert torch.equal(weights["2.weight"], plain[2].weight)
    assert torch.equal(model.state_dict()["2.weight"], plain[2].weight)
    assert model[2].weight.is_meta


def test_copying_into_a_placeholder_of_a_read_only_map_is_refused(x, read_only, net, offloaded):
    model = net()
    offloaded(model, weights_map=read_only(model.state_dict()))
    with pytest.raises(OffloadedWeightError, match=r"0\.weight.*read-only ReadOnly"):
        model[0].weight.copy_(torch.ones(4, 4))


def test_a_weight_that_had_no_value_before_is_no_placeholder_when_the_hook_goes(offloaded):
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    model[0].weight.note = "mine"
    offloaded(model, weights_map={"0.weight": torch.eye(4), "0.bias": torch.zeros(4)})
    assert is_placeholder(model[0].weight)
    remove_hook_from_module(model, recurse=True)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.is_meta
    assert model[0].weight.note == "mine"


@pytest.mark.parametrize("move", ["to", "cpu", "to_empty", "share_memory"])
def test_moving_an_offloaded_module_is_refused_by_name(move, x, net, offloaded):
    model = net()
    expected = model(x)
    offloaded(model)
    arguments = {"to": ["cpu"], "to_empty": [], "cpu": [], "share_memory": []}[move]
    options = {"device": "cpu"} if move == "to_empty" else {}
    with pytest.raises(OffloadedWeightError, match=r"0\.weight is offloaded.*remove_hook_from_module"):
        getattr(model, move)(*arguments, **options)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("overwrites", [False, True])
def test_converting_an_offloaded_model_still_takes_effect(x, overwrites, net, offloaded):
    torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    try:
        model = offloaded(net()).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert is_placeholder(model[0].weight)
    assert model(x.double()).dtype is torch.float64
    with align_module_device(model[0]):
        assert model[0].weight.dtype is torch.float64
    remove_hook_from_module(model, recurse=True)
    assert type(model[0].weight) is nn.Parameter


def test_gradients_of_a_functional_call_are_those_of_the_given_weights(x, net, offloaded):
    model = net()
    given = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).sum()

    expected = torch.func.grad(loss)(given)
    offloaded(model)
    torch.testing.assert_close(torch.func.grad(loss)(given), expected)
    batched = {name: torch.stack([value, value * 2]) for name, value in given.items()}
    torch.testing.assert_close(torch.vmap(loss)(batched)[0], loss(given))
    assert is_placeholder(model[0].weight)


def _norm(**options):
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    hook = AlignDevicesHook("cpu", offload=True, offload_buffers=True, **options)
    return add_hook_to_module(norm, hook)


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.add_(2.0),
        lambda buffer: buffer.__setitem__(slice(None), 2.0),
        lambda buffer: buffer.copy_(torch.full((4,), 2.0)),
        lambda buffer: buffer.data.fill_(2.0),
    ],
)
def test_writing_to_a_buffer_after_a_change_of_dtype_is_kept(write):
    norm = _norm()
    before = norm.running_mean
    norm.double()
    assert norm.running_mean is before
    write(norm.running_mean)
    assert torch.equal(norm.state_dict()["running_mean"], torch.full((4,), 2.0, dtype=torch.float64))
    assert norm(torch.full((1, 4), 2.0, dtype=torch.float64)).abs().max() == 0


def test_the_state_dict_has_the_new_dtype_before_the_next_forward():
    assert _norm().half().state_dict()["running_var"].dtype == torch.float16


def test_writing_to_a_parameter_that_a_conversion_has_replaced_is_kept(offload):
    layer = offload(nn.Linear(4, 4).requires_grad_(False))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    layer.weight.zero_()
    assert layer.state_dict()["weight"].abs().max() == 0
    layer.bias.zero_()
    assert layer(torch.ones(1, 4, dtype=torch.float64)).abs().max() == 0


def test_moving_a_weight_to_its_own_device_is_no_move(offload):
    layer = offload(nn.Linear(4, 4).requires_grad_(False))
    assert layer.weight.to(layer.weight.device) is layer.weight
    assert layer.weight.to(layer.weight) is layer.weight
    as_double = layer.weight.to(layer.weight.device, torch.float64)
    assert torch.equal(as_double.float(), layer.state_dict()["weight"])
