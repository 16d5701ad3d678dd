"""A placeholder that somebody put elsewhere keeps its value: tied, pruned, parametrized, shared, and after its hook."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from acc_hooks import (
    OffloadedWeightError,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


def _tie(model):
    model[2].weight = model[0].weight


def test_a_tie_made_after_offloading_is_in_the_state_dict_and_stays_after_removal(net, offloaded, x):
    model, expected = offloaded(net()), net()
    _tie(model), _tie(expected)
    assert torch.equal(model(x), expected(x))
    assert torch.equal(model.state_dict()["2.weight"], expected[0].weight)
    remove_hook_from_submodules(model)
    assert model[2].weight is model[0].weight
    assert type(model[2].weight) is nn.Parameter
    assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize("first", [0, 2])
def test_a_tie_made_after_offloading_outlives_the_hook_of_either_name(net, offloaded, x, first):
    model, expected = offloaded(net()), net()
    _tie(model), _tie(expected)
    remove_hook_from_module(model[first])
    assert torch.equal(model(x), expected(x))
    assert torch.equal(copy.deepcopy(model)(x), expected(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected(x))
    remove_hook_from_submodules(model)
    assert model[2].weight is model[0].weight
    assert torch.equal(model(x), expected(x))


def test_a_tied_model_is_offloaded_again_with_its_tie(net, offloaded, x):
    model, expected = offloaded(net()), net()
    _tie(model), _tie(expected)
    remove_hook_from_submodules(model)
    assert torch.equal(offloaded(model)(x), expected(x))
    assert model[2].weight is model[0].weight


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "0.weight_orig"),
        (
            lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
            "0.parametrizations.weight.original",
        ),
    ],
    ids=["pruned", "parametrized"],
)
def test_a_weight_under_another_name_is_saved_and_given_back(net, offloaded, x, change, name):
    model, expected = offloaded(net()), net()
    change(model[0]), change(expected[0])
    assert torch.equal(model(x), expected(x))
    assert torch.equal(model.state_dict()[name], expected.state_dict()[name])
    remove_hook_from_submodules(model)
    assert not any(tensor.is_meta for tensor in model.parameters())
    assert torch.equal(model(x), expected(x))


def test_a_new_module_that_shares_an_offloaded_weight_keeps_it(net, offloaded, x):
    model, expected = offloaded(net()), net()
    model.extra = nn.Linear(4, 4, bias=False)
    model.extra.weight = model[0].weight
    outside = model[0].weight
    model.extra.turned = torch.t(input=outside)  # no parameter, and not ours to replace
    model.extra.register_buffer("view", torch.t(input=outside))
    assert torch.equal(model.state_dict()["extra.weight"], expected[0].weight)
    remove_hook_from_submodules(model)
    assert model.extra.weight is model[0].weight
    assert type(model.extra.view) is torch.Tensor
    assert torch.equal(x @ outside.T, x @ expected[0].weight.T)  # in somebody's hand
    assert torch.equal(model.extra.turned + 0, model.extra.view)
    with torch.no_grad():
        outside.fill_(3.0)
    assert torch.all(model[0].weight == 3)


def test_a_value_is_only_read_for_a_placeholder_that_somebody_has(net, offloaded, read_only):
    model = net()
    weights = read_only(model.state_dict())
    offloaded(model, weights_map=weights)
    del model[0].weight
    weights.asked.clear()
    remove_hook_from_submodules(model)
    assert "0.weight" not in weights.asked


def test_a_weight_that_was_offloaded_without_a_value_is_a_meta_tensor_wherever_it_is(net):
    model = net()
    weights = dict(model.state_dict())
    model.to("meta")
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    outside = model[0].weight
    _tie(model)
    remove_hook_from_submodules(model)
    assert model[2].weight is model[0].weight
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.is_meta
    with pytest.raises(OffloadedWeightError, match="hook that brings its value is gone"):
        outside + 1
