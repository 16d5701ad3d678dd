from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    SequentialHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    attached_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

STORAGE = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def cast(module, storage=torch.bfloat16, compute=torch.float32):
    return add_hook_to_module(module, LayerwiseCastingHook(storage, compute, False))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.final_norm_proj = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv1d(2, 2, 1)))

    def forward(self, x):
        return self.block(self.final_norm_proj(self.norm(self.proj_in(x))))


@pytest.mark.parametrize("storage", STORAGE)
def test_weights_are_stored_small_and_computed_with_large(storage, x):
    layer = nn.Linear(4, 4).requires_grad_(False)
    expected = copy.deepcopy(layer).to(storage).to(torch.float32)(x)
    cast(layer, storage)
    assert layer.weight.dtype == storage
    output = layer(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected)
    assert layer.weight.dtype == layer.state_dict()["bias"].dtype == storage


def test_parameters_show_the_stored_weights_during_the_forward(x):
    seen = []

    class Layer(nn.Linear):
        def forward(self, x):
            seen.extend([self.weight.dtype, next(self.parameters()).dtype, self.state_dict()["weight"].dtype])
            return super().forward(x)

    cast(Layer(4, 4))(x)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_removal_gives_each_tensor_the_dtype_it_had():
    layer = nn.BatchNorm1d(4)
    layer.weight.data = layer.weight.data.double()
    count = layer.num_batches_tracked.dtype
    cast(layer)
    assert layer.weight.dtype == layer.running_mean.dtype == torch.bfloat16
    remove_hook_from_module(layer)
    assert layer.weight.dtype == torch.float64
    assert layer.running_mean.dtype == torch.float32
    assert layer.num_batches_tracked.dtype == count


def test_a_gradient_arrives_on_the_stored_weight_and_follows_its_dtype(x):
    layer = nn.Linear(4, 4)
    cast(layer)
    layer(x).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16
    assert layer.bias.grad.any()
    remove_hook_from_module(layer)
    assert layer.weight.grad.dtype == torch.float32


def test_a_training_step_changes_the_stored_weights(x):
    layer = cast(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = layer(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("chained", [False, True])
def test_an_exception_leaves_the_module_as_stored(raising, x, chained):
    hook = LayerwiseCastingHook(torch.bfloat16, torch.float32, False)
    add_hook_to_module(raising, SequentialHook(AlignDevicesHook("cpu"), hook) if chained else hook)
    keys = set(raising.__dict__)
    raising.fails = True
    with pytest.raises(RuntimeError, match="forward failed"):
        raising(x)
    assert set(raising.__dict__) == keys
    assert raising.scale.dtype == raising.linear.weight.dtype == torch.bfloat16


def test_everything_below_the_module_is_cast_too(raising, x):
    cast(raising)
    assert raising(x).dtype == torch.float32
    assert raising.linear.weight.dtype == raising.shift.dtype == torch.bfloat16
    assert "weight" not in raising.linear.__dict__


def test_running_statistics_written_by_the_forward_are_stored(x):
    layer = nn.BatchNorm1d(4)
    expected = copy.deepcopy(layer)
    expected(x)
    cast(layer)
    layer(x)
    assert layer.running_mean.dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_mean.float(), expected.running_mean, rtol=0.01, atol=0.01)


def test_a_buffer_assigned_by_the_forward_is_stored_small(x):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sum", torch.zeros(4))

        def forward(self, x):
            self.sum = self.sum + x.sum(0)
            return x

    layer = cast(Counts())
    for _ in range(2):
        layer(x)
    assert layer.sum.dtype == torch.bfloat16
    assert "sum" not in layer.__dict__
    torch.testing.assert_close(layer.sum.float(), 2 * x.sum(0), rtol=0.02, atol=0.02)


def test_a_recurrent_module_computes_and_keeps_no_large_weights():
    layer = nn.LSTM(2, 3).requires_grad_(False)
    x = torch.ones(4, 1, 2)
    expected = copy.deepcopy(layer).bfloat16().float()(x)[0]
    cast(layer)
    torch.testing.assert_close(layer(x)[0], expected)
    assert {weight.dtype for weight in layer._flat_weights} == {torch.bfloat16}


@pytest.mark.parametrize("first", ["cast", "offload"])
def test_cast_weights_can_be_offloaded_too(first, x):
    layer = nn.Linear(4, 4).requires_grad_(False)
    expected = copy.deepcopy(layer).bfloat16().float()(x)
    hooks = {
        "cast": LayerwiseCastingHook(torch.bfloat16, torch.float32, False),
        "offload": AlignDevicesHook("cpu", offload=True),
    }
    add_hook_to_module(layer, hooks.pop(first))
    add_hook_to_module(layer, hooks.popitem()[1], append=True)
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected)
    assert layer.weight.is_meta


def test_pre_and_post_forward_by_hand_cast_the_module():
    layer = cast(nn.Linear(2, 2))
    layer._hf_hook.pre_forward(layer)
    assert layer.weight.dtype == torch.float32
    layer._hf_hook.post_forward(layer, None)
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_casts_its_own_weights(copier, x):
    layer = cast(nn.Linear(4, 4).requires_grad_(False))
    expected = layer(x)
    other = copier(layer)
    other.weight.zero_()
    other.bias.zero_()
    assert not other(x).any()
    torch.testing.assert_close(layer(x), expected)


def test_four_threads_share_one_module(x):
    layer = nn.Linear(4, 4).requires_grad_(False)
    cast(layer)
    expected = layer(x)
    wrong: list[object] = []

    def run():
        try:
            for _ in range(200):
                if not torch.equal(layer(x), expected):
                    wrong.append("result")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert "weight" not in layer.__dict__


@pytest.mark.parametrize("dtype", [torch.int8, "float16", None])
def test_a_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match="storage_dtype must be a floating"):
        LayerwiseCastingHook(dtype, torch.float32, False)


# --- attaching ---------------------------------------------------------------------------------------------------


def stored(model):
    return {name for name, module in model.named_modules() if attached_hook(module) is not None}


def attach(model, **options):
    return attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, **options)


def test_linear_and_convolution_layers_get_the_hook_and_others_do_not(x):
    model = Net().requires_grad_(False)
    assert attach(model) is None
    assert stored(model) == {"proj_in", "final_norm_proj", "block.0", "block.1.0"}
    assert model.norm.weight.dtype == torch.float32
    assert model(x).dtype == torch.float32


def test_a_pattern_skips_by_name_and_a_string_is_one_pattern():
    model = Net()
    attach(model, skip_modules_pattern="norm")
    assert stored(model) == {"proj_in", "block.0", "block.1.0"}
    model = Net()
    attach(model, skip_modules_pattern=("^proj", "block"))
    assert stored(model) == {"final_norm_proj"}


def test_a_skipped_class_is_skipped_with_everything_below():
    model = Net()
    attach(model, skip_modules_classes=(nn.Sequential,))
    assert stored(model) == {"proj_in", "final_norm_proj"}


@pytest.mark.parametrize("attached", ["outer first", "inner first"])
@pytest.mark.parametrize("removed", ["outer first", "inner first"])
def test_a_hooked_layer_in_a_hooked_module_is_cast_once(attached, removed, x):
    casts = []

    class Counting(LayerwiseCastingHook):
        def _make_ready(self, module):
            super()._make_ready(module)
            casts.extend(name for _, name in self._loan.parameters)

    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    expected = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)(x)
    both = {"outer first": (model, model[0]), "inner first": (model[0], model)}
    for module in both[attached]:
        add_hook_to_module(module, Counting(torch.bfloat16, torch.float32, False))
    torch.testing.assert_close(model(x), expected)
    assert sorted(casts) == ["bias", "weight"]
    assert model[0].weight.dtype == torch.bfloat16
    for module in both[removed]:
        remove_hook_from_module(module)
        torch.testing.assert_close(model(x), expected)
    assert model[0].weight.dtype == torch.float32


def test_attaching_twice_casts_once():
    model = Net()
    attach(model)
    hook = model.proj_in._hf_hook
    attach(model)
    assert model.proj_in._hf_hook is hook
    remove_hook_from_submodules(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_layer_under_two_names_is_skipped_if_one_of_them_is():
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"keep": layer, "skip": layer, "other": nn.Linear(2, 2)})
    attach(model, skip_modules_pattern="skip")
    assert stored(model) == {"other"}


def test_a_layer_itself_can_be_given():
    layer = nn.Linear(2, 2)
    attach(layer)
    assert layer.weight.dtype == torch.float8_e4m3fn


# --- what a tensor was before --------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [(0, 1), (1, 0)])
def test_layers_that_share_a_weight_get_back_its_dtype(removed, x):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].weight = model[0].weight
    attach(model)
    expected = model(x)
    for index in removed:
        remove_hook_from_module(model[index])
        torch.testing.assert_close(model(x), expected)
    assert model[0].weight is model[1].weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_hook_that_is_attached_is_refused_elsewhere_until_it_is_removed():
    hook = LayerwiseCastingHook(torch.bfloat16, torch.float32, False)
    one, other = add_hook_to_module(nn.Linear(2, 2), hook), nn.Linear(2, 2).half()
    with pytest.raises(ValueError, match="one hook for each module"):
        add_hook_to_module(other, hook)
    assert other.weight.dtype == torch.float16
    assert attached_hook(other) is None
    remove_hook_from_module(one)
    add_hook_to_module(other, hook)
    remove_hook_from_module(other)
    assert other.weight.dtype == torch.float16


def test_buffers_offloaded_after_casting_get_their_dtype_back():
    norm = nn.BatchNorm1d(4)
    add_hook_to_module(norm, LayerwiseCastingHook(torch.bfloat16, torch.float32, False))
    add_hook_to_module(norm, AlignDevicesHook("cpu", offload=True, offload_buffers=True), append=True)
    remove_hook_from_module(norm)
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float32
