"""What a call holds is put back whole: all that can go home does, and an interrupt anywhere leaves nothing behind."""

import pytest
import torch
from hooks_interrupts import interrupt_at
from torch import nn

from acc_hooks import AlignDevicesHook, OffloadedWeightError, add_hook_to_module, align_module_device, inputs


@pytest.mark.parametrize("tied", [False, True])
def test_an_interrupt_anywhere_leaves_no_weights_and_no_open_forward(offloaded, net, x, writable, tied):
    model = net()
    if tied:
        model[2].weight = model[0].weight
    weights = writable(model.state_dict())
    offloaded(model, weights_map=weights, prefetch=0)
    at = 1
    while interrupt_at(at, lambda: model(x)):
        assert inputs._forward.copies is None, at
        model(x)
        assert all(tensor.is_meta for tensor in model.parameters()), at
        zeros = {name: torch.full_like(value, at) for name, value in weights.items()}
        model.load_state_dict(zeros)
        assert all((weights[name] == at).all() for name in weights), at
        at += 1
    assert at > 100


def test_an_interrupted_visit_keeps_what_was_changed(writable):
    at, kept = 1, []
    while True:
        layer = nn.Linear(2, 2)
        weights = writable(layer.state_dict())
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
        visit = align_module_device(layer)
        visit.__enter__()
        layer.weight.data.fill_(7.0)
        if not interrupt_at(at, lambda visit=visit: visit.__exit__(None, None, None)):
            break
        del visit
        layer(torch.ones(1, 2))
        assert layer.weight.is_meta, at
        kept.append(bool((weights["weight"] == 7).all()))
        at += 1
    assert at > 10
    assert all(kept), kept


def test_what_can_go_home_does_though_the_map_refuses_another(writable):
    class Full(writable):
        def __setitem__(self, name, value):
            if name == "weight":
                raise OSError("disk full")
            super().__setitem__(name, value)

    layer = nn.Linear(2, 2).requires_grad_(False)
    weights = Full(layer.state_dict())
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with pytest.raises(OSError, match="disk full"), align_module_device(layer):
        layer.weight.fill_(1.0)
        layer.bias.fill_(1.0)
    assert (weights["bias"] == 1).all()
    layer(torch.ones(1, 2))  # said once


class Fails(AlignDevicesHook):
    where = ""

    def pre_forward(self, module, *args, **kwargs):
        result = super().pre_forward(module, *args, **kwargs)
        if self.where == "pre":
            raise ZeroDivisionError
        return result

    def post_forward(self, module, output):
        if self.where == "post":
            raise ZeroDivisionError
        return super().post_forward(module, output)


@pytest.mark.parametrize("where", ["pre", "post"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_subclass_that_raises_in_its_own_method_leaves_no_weights(where, chained):
    layer = nn.Linear(2, 2)
    hook = Fails("cpu", offload=True)
    hook.where = where
    if chained:
        add_hook_to_module(layer, AlignDevicesHook("cpu"))
    add_hook_to_module(layer, hook, append=True)
    with pytest.raises(ZeroDivisionError):
        layer(torch.ones(1, 2))
    assert layer.weight.is_meta


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), ("weights", "str")])
def test_a_map_that_gives_no_tensor_is_named(given, kind):
    class Odd(dict):
        def __getitem__(self, name):
            return given

    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=Odd(layer.state_dict())))
    with pytest.raises(
        OffloadedWeightError, match=f"weights map \\(Odd\\) gave an object of the type {kind}"
    ):
        layer(torch.ones(1, 2))
