from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acc_hooks import (
    OffloadedWeightError,
    align_module_device,
    attach_align_device_hook,
    remove_hook_from_module,
)
from acc_hooks.placeholder import is_placeholder

USES = {
    "linear": lambda w, x: F.linear(x, w),
    "matmul with the transpose": lambda w, x: x @ w.T,
    "matmul": lambda w, x: x @ w,
    "einsum": lambda w, x: torch.einsum("bi,oi->bo", x, w),
    "conv1d": lambda w, x: F.conv1d(x[None], w[..., None]),
    "embedding": lambda w, x: F.embedding(torch.tensor([0]), w),
    "stack": lambda w, x: torch.stack([x[:1], w[:1]]),
    "a list": lambda w, x: torch.cat([w, w]),
    "a look at an item": lambda w, x: w[0, 0].item(),
    "detached": lambda w, x: F.linear(x, w.detach()),
    "by data": lambda w, x: F.linear(x, w.data),
    "converted": lambda w, x: F.linear(x.double(), w.to(torch.float64)),
    "to": lambda w, x: w.to("cpu"),
    "cpu": lambda w, x: w.cpu(),
    "clone": lambda w, x: w.clone(),
    "like": lambda w, x: torch.empty_like(w, device="cpu"),
    "zero_": lambda w, x: w.zero_(),
    "data.zero_": lambda w, x: w.data.zero_(),
    "init": lambda w, x: nn.init.kaiming_uniform_(w),
    "item assignment": lambda w, x: w.__setitem__(0, 1.0),
    "out": lambda w, x: torch.mm(x[:1].T, x[:1], out=w),
    "add_": lambda w, x: w.add_(1),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)


def offloaded(model: nn.Module, **options) -> nn.Module:
    attach_align_device_hook(model, execution_device="cpu", offload=True, **options)
    return model


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_placeholder_is_never_computed_with_and_the_error_names_it_and_the_ways_out(use, grad, x):
    model = offloaded(net())
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(OffloadedWeightError, match=r"^2\.weight is off") as caught,
    ):
        USES[use](model[2].weight, x)
    assert "preload_module_classes" in str(caught.value)
    assert "align_module_device" in str(caught.value)
    assert "remove_hook_from_module" in str(caught.value)


def test_a_parent_that_computes_with_its_childs_weight_is_told_so(x):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x):
            return F.linear(x, self.child.weight)

    model = Parent().requires_grad_(False)
    expected = model(x)
    with pytest.raises(OffloadedWeightError, match=r"child\.weight"):
        offloaded(model)(x)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(offloaded(model, preload_module_classes=["Parent"])(x), expected)


def test_a_placeholder_tells_what_the_weight_is():
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


def test_copying_into_a_placeholder_takes_effect(x):
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


def test_copying_into_a_placeholder_of_a_read_only_map_is_refused(x, read_only):
    model = net()
    offloaded(model, weights_map=read_only(model.state_dict()))
    with pytest.raises(OffloadedWeightError, match=r"0\.weight.*read-only ReadOnly"):
        model[0].weight.copy_(torch.ones(4, 4))


def test_parameters_saved_one_by_one_are_saved_with_their_values():
    model = net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.testing.assert_close({name: value.detach() for name, value in loaded.items()}, expected)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("preload", [[], ["Tied"]])
def test_a_copied_model_has_placeholders_and_ties_of_its_own(copier, preload, tied):
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


def test_a_pickled_model_does_not_carry_its_weights_twice():
    layer = nn.Linear(100, 100)
    model = offloaded(nn.Sequential(layer))
    assert len(pickle.dumps(model)) < 1.5 * 100 * 100 * 4


def test_a_placeholder_keeps_no_hook_alive_and_says_so_when_it_is_gone():
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


def test_a_weight_that_had_no_value_before_is_no_placeholder_when_the_hook_goes():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    model[0].weight.note = "mine"
    offloaded(model, weights_map={"0.weight": torch.eye(4), "0.bias": torch.zeros(4)})
    assert is_placeholder(model[0].weight)
    remove_hook_from_module(model, recurse=True)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.is_meta
    assert model[0].weight.note == "mine"


@pytest.mark.parametrize("move", ["to", "cpu", "to_empty", "share_memory"])
def test_moving_an_offloaded_module_is_refused_by_name(move, x):
    model = net()
    expected = model(x)
    offloaded(model)
    arguments = {"to": ["cpu"], "to_empty": [], "cpu": [], "share_memory": []}[move]
    options = {"device": "cpu"} if move == "to_empty" else {}
    with pytest.raises(OffloadedWeightError, match=r"0\.weight is offloaded.*remove_hook_from_module"):
        getattr(model, move)(*arguments, **options)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("overwrites", [False, True])
def test_converting_an_offloaded_model_still_takes_effect(x, overwrites):
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


def test_a_copy_made_during_a_forward_has_placeholders(x):
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


def test_a_shallow_copy_runs_too(x):
    layer = offloaded(nn.Linear(4, 4))
    expected = layer(x)
    other = copy.copy(layer)
    assert other.weight is layer.weight
    for module in (other, layer, other):
        torch.testing.assert_close(module(x), expected)


def test_gradients_of_a_functional_call_are_those_of_the_given_weights(x):
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
