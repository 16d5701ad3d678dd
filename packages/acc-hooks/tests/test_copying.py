from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from acc_hooks import OffloadedWeightError, remove_hook_from_module
from acc_hooks.placeholder import is_placeholder

COPIERS = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]


def saved_and_loaded(values):
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("preload", [[], ["Sequential"]])
def test_parameters_saved_one_by_one_are_saved_with_their_values(preload, net, offloaded):
    model = net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, preload_module_classes=preload)
    pickle.dumps(model)  # leaves nothing behind that changes what is saved next
    for values in (dict(model.named_parameters()), model.state_dict()):
        loaded = saved_and_loaded(values)
        torch.testing.assert_close({name: value.detach() for name, value in loaded.items()}, expected)
    for values in (dict(model[2].named_parameters()), dict(model[2].state_dict())):
        assert torch.equal(saved_and_loaded(values)["weight"], expected["2.weight"])
    assert type(saved_and_loaded(model[2].weight)) is nn.Parameter


@pytest.mark.parametrize("copier", [copy.deepcopy, saved_and_loaded])
def test_a_weight_and_a_view_of_it_are_copied_as_values(copier, net, offloaded):
    model = net()
    weight = model[2].weight.clone()
    offloaded(model)
    for placeholder, expected in [
        (model[2].weight, weight),
        (model[2].weight[1], weight[1]),
        (model[2].weight.detach().t(), weight.t()),
    ]:
        made = copier(placeholder)
        assert not is_placeholder(made)
        assert torch.equal(made, expected)
    copier(model[2].weight).zero_()
    assert torch.equal(model.state_dict()["2.weight"], weight)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_child_that_is_copied_without_the_block_it_is_loaded_with_has_its_weights(
    copier, x, net, offloaded
):
    model = net()
    expected = model[2](x)
    offloaded(model, preload_module_classes=["Sequential"])
    copier(model)
    child = copier(model[2])
    assert type(child.weight) is nn.Parameter
    assert type(child) is nn.Linear
    torch.testing.assert_close(child(x), expected)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_view_that_was_assigned_is_copied_as_its_value(copier, x, net, offloaded):
    model = offloaded(net())
    model[2].weight = nn.Parameter(model[0].weight.t(), requires_grad=False)
    expected = model(x)
    other = copier(model)
    assert type(other[2].weight) is nn.Parameter
    assert is_placeholder(other[0].weight)
    torch.testing.assert_close(other(x), expected)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("preload", [[], ["Tied"]])
def test_a_copied_model_has_placeholders_and_ties_of_its_own(copier, preload, tied, offloaded):
    ids = torch.tensor([1, 2])
    tied.requires_grad_(False)
    expected = tied(ids)
    offloaded(tied, preload_module_classes=preload)
    tied(ids)
    other = copier(tied)
    del tied
    assert is_placeholder(other.embed.weight)
    assert other.embed.weight is other.head.weight
    torch.testing.assert_close(other(ids), expected)
    other.middle.weight.copy_(torch.zeros(6, 6))  # the copy's own hook answers
    assert not other.state_dict()["middle.weight"].any()
    remove_hook_from_module(other, recurse=True)
    assert other.embed.weight is other.head.weight
    assert type(other.embed.weight) is nn.Parameter


def test_a_pickled_model_does_not_carry_its_weights_twice(offloaded):
    layer = nn.Linear(100, 100)
    model = offloaded(nn.Sequential(layer))
    assert len(pickle.dumps(model)) < 1.5 * 100 * 100 * 4


def test_a_placeholder_keeps_no_hook_alive_and_says_so_when_it_is_gone(net, offloaded):
    gc.collect()
    gc.disable()
    try:
        model = offloaded(net())
        weight, hook = model[0].weight, weakref.ref(model[0]._hf_hook)
        pickle.dumps(model)
        del model
        assert hook() is None
    finally:
        gc.enable()
    with pytest.raises(OffloadedWeightError, match=r"0\.weight"):
        pickle.dumps(weight)


def test_a_copy_made_during_a_forward_has_placeholders(x, offloaded):
    class Layer(nn.Linear):
        def forward(self, x):
            copies.extend([copy.deepcopy(self)])
            return super().forward(x)

    copies: list[nn.Module] = []
    model = offloaded(nn.Sequential(Layer(4, 4)).requires_grad_(False))
    expected = model(x)
    made = copies[0]
    assert is_placeholder(made.weight)
    copies.clear()
    torch.testing.assert_close(made(x), expected)


def test_a_shallow_copy_runs_too(x, offloaded):
    layer = offloaded(nn.Linear(4, 4))
    expected = layer(x)
    other = copy.copy(layer)
    assert other.weight is layer.weight
    for module in (other, layer, other):
        torch.testing.assert_close(module(x), expected)
