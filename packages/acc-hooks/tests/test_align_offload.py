from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    ModelHook,
    OffloadedWeightError,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    remove_hook_from_module,
)

META = torch.device("meta")  # plays a second device
CPU = torch.device("cpu")


# --- weights that are offloaded ----------------------------------------------------------------------------------


def test_offloaded_parameters_are_on_meta_outside_of_the_forward(raising, x, offload):
    expected = raising(x)
    scale = raising.scale
    offload(raising)
    assert raising.scale.device == META
    assert raising.shift.device == CPU
    assert raising.linear.weight.device == CPU
    torch.testing.assert_close(raising(x), expected)
    assert raising.scale.device == META
    remove_hook_from_module(raising)
    torch.testing.assert_close(raising.scale, scale)
    torch.testing.assert_close(raising(x), expected)


def test_the_second_call_behaves_like_the_first(raising, x, offload):
    expected = raising(x)
    offload(raising, place_submodules=True)
    for _ in range(3):
        torch.testing.assert_close(raising(x), expected)


def test_buffers_are_offloaded_on_request_unless_no_state_dict_holds_them(x, offload):
    layer = nn.BatchNorm1d(4).eval()
    layer.register_buffer("volatile", torch.ones(1), persistent=False)
    expected = layer(x)
    offload(layer, offload_buffers=True)
    assert layer.running_mean.device == layer.num_batches_tracked.device == META
    assert layer.volatile.device == CPU
    torch.testing.assert_close(layer(x), expected)
    assert layer._hf_hook.original_devices.keys() == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "volatile",
    }


def test_running_statistics_written_in_a_forward_are_kept(x, offload, writable):
    plain = nn.BatchNorm1d(4)
    layer = copy.deepcopy(plain)
    weights = writable(layer.state_dict())
    offload(layer, offload_buffers=True, weights_map=weights)
    for module in (plain, layer):
        module(x)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


def test_a_place_submodules_hook_holds_everything_below(raising, x, offload):
    expected = raising(x)
    offload(raising, place_submodules=True)
    assert raising.linear.weight.device == META
    torch.testing.assert_close(raising(x), expected)
    assert {name for name, value in raising.state_dict().items() if value.is_meta} == set()
    remove_hook_from_module(raising)
    assert raising.linear.weight.device == CPU


def test_the_map_is_asked_for_exactly_the_tensors_needed_once(x, offload, read_only):
    layer = nn.Linear(4, 4)
    weights = read_only({**layer.state_dict(), "other": torch.ones(1)})
    offload(layer, weights_map=weights)
    assert weights.asked == []
    layer(x)
    assert sorted(weights.asked) == ["bias", "weight"]


def test_an_entry_the_map_lacks_is_named_before_anything_is_lost(offload):
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="bias cannot be offloaded"):
        offload(layer, weights_map={"weight": torch.ones(4, 4)})
    assert layer.weight.device == layer.bias.device == CPU


def test_a_map_that_loses_an_entry_later_is_a_clear_error(x, offload):
    layer = nn.Linear(4, 4)
    weights = dict(layer.state_dict())
    offload(layer, weights_map=weights)
    del weights["bias"]
    with pytest.raises(OffloadedWeightError, match="bias is offloaded"):
        layer(x)
    assert layer.weight.device == META


def test_a_value_of_another_shape_is_refused_with_the_name(x, offload):
    layer = nn.Linear(4, 4)
    weights = dict(layer.state_dict())
    offload(layer, weights_map=weights)
    weights["weight"] = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"'weight'.*\(5, 4\)"):
        layer(x)


def test_offloading_without_a_device_to_run_on_says_so(x):
    layer = add_hook_to_module(nn.Linear(4, 4), AlignDevicesHook(offload=True))
    with pytest.raises(ValueError, match="execution_device"):
        layer(x)


def test_offloading_what_is_on_meta_needs_a_map(offload):
    with pytest.raises(ValueError, match="weights_map"):
        offload(nn.Linear(2, 2, device="meta"))


def test_one_hook_cannot_offload_two_modules():
    hook = AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(nn.Linear(2, 2), hook)
    with pytest.raises(ValueError, match="one hook for each module"):
        add_hook_to_module(nn.Linear(2, 2), hook)


@pytest.mark.parametrize("chained", [False, True])
def test_an_exception_in_the_forward_leaves_the_weights_offloaded(raising, x, chained):
    expected = raising(x)
    hook = AlignDevicesHook("cpu", offload=True, place_submodules=True)
    add_hook_to_module(raising, SequentialHook(ModelHook(), hook) if chained else hook)
    raising.fails = True
    with pytest.raises(RuntimeError, match="forward failed"):
        raising(x)
    assert raising.scale.device == raising.linear.weight.device == META
    raising.fails = False
    torch.testing.assert_close(raising(x), expected)


def test_values_taken_from_meta_stay_there_when_the_hook_goes(x, offload):
    layer = nn.Linear(4, 4, device="meta")
    offload(layer, weights_map={"weight": torch.eye(4), "bias": torch.zeros(4)})
    torch.testing.assert_close(layer(x), x)
    remove_hook_from_module(layer)
    assert layer.weight.device == META


def test_requires_grad_and_attributes_survive(x, offload):
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    layer.weight.note = "mine"
    offload(layer)
    with align_module_device(layer):
        assert layer.weight.requires_grad is False
        assert layer.weight.note == "mine"
        layer.bias.requires_grad_(False)
    assert layer.bias.requires_grad is False
    remove_hook_from_module(layer)
    assert layer.weight.note == "mine"
    assert layer.weight.requires_grad is layer.bias.requires_grad is False


def test_a_change_of_dtype_takes_effect(x, offload):
    layer = offload(nn.Linear(4, 4))
    layer.double()
    assert layer(x.double()).dtype == torch.float64
    assert layer.state_dict()["weight"].dtype == torch.float64


def test_a_recurrent_layer_can_be_offloaded_and_keeps_no_weights_between_calls(offload):
    layer = nn.LSTM(2, 3)
    x = torch.ones(4, 1, 2)
    expected = layer(x)[0]
    offload(layer)
    assert all(weight.is_meta for weight in layer._flat_weights)
    for _ in range(2):
        torch.testing.assert_close(layer(x)[0], expected)
        assert all(weight.is_meta for weight in layer._flat_weights)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x)[0], expected)
    remove_hook_from_module(layer)
    assert not any(weight.is_meta for weight in layer._flat_weights)
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_module_that_calls_itself_is_loaded_once(offload, read_only):
    class Countdown(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, n):
            return self.weight if n == 0 else self(n - 1) + self.weight

    module = Countdown()
    weights = read_only(module.state_dict())
    offload(module, weights_map=weights)
    assert module(3).item() == 4
    assert weights.asked == ["weight"]
    assert module.weight.device == META


def test_statistics_of_8_bit_weights_follow_their_weight_only(offload):
    module = nn.Linear(2, 2, bias=True).requires_grad_(False)
    module.weight.data = torch.ones(2, 2, dtype=torch.int8)
    scb = torch.ones(2, dtype=torch.float16)
    offload(module, weights_map={"weight": module.weight.data, "bias": module.bias.data, "SCB": scb})
    with align_module_device(module):
        assert torch.equal(module.weight.SCB, scb)
        assert not hasattr(module.bias, "SCB")


def test_pre_and_post_forward_by_hand_load_and_let_go(x, offload):
    layer = offload(nn.Linear(4, 4))
    hook = layer._hf_hook
    for _ in range(2):
        hook.pre_forward(layer)
        assert layer.weight.device == CPU
        hook.post_forward(layer, torch.tensor([]))
        assert layer.weight.device == META
    hook.pre_forward(layer)
    layer(x)
    assert layer.weight.device == META


def test_a_hook_can_be_rebuilt_from_its_attributes(x, offload):
    layer = offload(nn.Linear(4, 4))
    expected = layer(x)
    old = layer._hf_hook
    names = inspect.signature(type(old).__init__).parameters
    remove_hook_from_module(layer)
    add_hook_to_module(layer, type(old)(**{k: v for k, v in old.__dict__.items() if k in names}))
    assert layer.weight.device == META
    torch.testing.assert_close(layer(x), expected)


def test_another_map_can_be_put_in_place(x, offload):
    layer = offload(nn.Linear(4, 4))
    layer._hf_hook.weights_map = {"weight": torch.eye(4), "bias": torch.zeros(4)}
    torch.testing.assert_close(layer(x), x)


def test_a_subclass_that_overrides_the_calls_is_heard(x):
    class Mine(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            args, kwargs = super().pre_forward(module, *args, **kwargs)
            return (args[0] * 0,), kwargs

    layer = nn.Linear(4, 4)
    bias = layer.bias.detach().clone()
    add_hook_to_module(layer, Mine("cpu", offload=True))
    torch.testing.assert_close(layer(x), bias.expand(2, 4))
    assert layer.weight.device == META
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 5))
    assert layer.weight.device == META


def test_given_maps_of_ties_are_filled_and_emptied(x, offload):
    value = torch.eye(4)
    shared = {value.data_ptr(): {}}
    seen = []

    class Layer(nn.Linear):
        def forward(self, x):
            seen.append(dict(shared[value.data_ptr()]))
            return super().forward(x)

    layer = Layer(4, 4, bias=False)
    offload(layer, weights_map={"weight": value}, tied_params_map=shared)
    layer(x)
    assert list(seen[0]) == [CPU]
    assert shared[value.data_ptr()] == {}


# --- gradients ---------------------------------------------------------------------------------------------------


def test_a_gradient_for_an_offloaded_weight_is_refused_by_name(x, offload):
    layer = offload(nn.Linear(4, 4))
    loss = layer(x).sum()
    with pytest.raises(OffloadedWeightError, match=r"bias|weight"):
        loss.backward()


def test_frozen_offloaded_weights_pass_gradients_through(x, offload):
    frozen = nn.Linear(4, 4).requires_grad_(False)
    adapter = nn.Linear(4, 4)
    model = nn.Sequential(adapter, frozen)
    model(x).sum().backward()
    expected = adapter.weight.grad
    adapter.weight.grad = None
    offload(frozen)
    model(x).sum().backward()
    torch.testing.assert_close(adapter.weight.grad, expected)


def test_gradients_of_inputs_alone_can_be_asked_for(x, offload):
    layer = nn.Linear(4, 4)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    offload(layer)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_checkpointed_layers_are_loaded_again_in_the_backward(x, offload):
    frozen = nn.Linear(4, 4).requires_grad_(False)
    x.requires_grad_()
    expected = torch.autograd.grad(frozen(x).sum(), x)[0]
    offload(frozen)
    output = torch.utils.checkpoint.checkpoint(frozen, x, use_reentrant=False)
    output.sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert frozen.weight.device == META


# --- state dicts -------------------------------------------------------------------------------------------------


def test_a_state_dict_holds_real_values(x, offload):
    layer = nn.Linear(4, 4)
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    offload(layer)
    torch.testing.assert_close(dict(layer.state_dict()), expected)
    model = nn.Sequential(layer)
    assert not any(value.is_meta for value in model.state_dict().values())
    assert layer.weight.device == META


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("submodules", [False, True])
def test_loading_a_state_dict_takes_effect(raising, x, assign, submodules, offload):
    other = copy.deepcopy(raising)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    offload(raising, place_submodules=submodules)
    result = raising.load_state_dict(other.state_dict(), assign=assign)
    assert not result.missing_keys
    torch.testing.assert_close(raising(x), other(x))
    assert raising.scale.device == META


def test_loading_into_a_read_only_store_is_refused(offload, read_only):
    layer = nn.Linear(4, 4)
    offload(layer, weights_map=read_only(layer.state_dict()))
    with pytest.raises(OffloadedWeightError, match="read-only ReadOnly"):
        layer.load_state_dict(nn.Linear(4, 4).state_dict())
    assert layer.weight.device == META


# --- copies, threads, lifetime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_offloaded_module_has_weights_of_its_own(copier, x, offload):
    layer = offload(nn.Linear(4, 4))
    expected = layer(x)
    other = copier(layer)
    with align_module_device(other), torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(x).any()
    torch.testing.assert_close(layer(x), expected)
    remove_hook_from_module(other)
    assert not other.weight.any()


def test_two_threads_run_one_offloaded_module(x, offload, read_only):
    layer = nn.Linear(4, 4)
    expected = layer(x)
    offload(layer, weights_map=read_only(layer.state_dict()))
    wrong: list[object] = []

    def run():
        try:
            with torch.no_grad():
                for _ in range(150):
                    if not torch.allclose(layer(x), expected):
                        wrong.append("result")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert layer.weight.device == META


def test_an_offloaded_model_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        attach_align_device_hook(model, execution_device="cpu", offload=True)
        model(torch.ones(1, 4)).sum()
        value = weakref.ref(model[0]._hf_hook.weights_map["weight"])
        placeholder = weakref.ref(model[0].weight)
        del model
        assert value() is None
        assert placeholder() is None
    finally:
        gc.enable()
