from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    offloaded,
    remove_hook_from_module,
    set_module_tensor_to_device,
)
from acc_hooks.elsewhere import home_behind
from acc_hooks.homes import differs
from acc_hooks.offloaded import OffloadedTensors
from acc_hooks.resident import Residents
from acc_ops.fake_accelerator import fake_accelerator

CPU = torch.device("cpu")


@pytest.fixture
def fake(needs_fake_accelerator):
    with fake_accelerator() as accelerator:
        yield accelerator


def test_holds_are_counted_and_the_last_one_lets_go():
    layer = nn.Linear(2, 2)
    weights = dict(layer.state_dict())
    tensors = OffloadedTensors(Residents(), "net.layer")
    tensors.take(layer, ["weight", "bias"], weights)
    placeholder = layer.weight
    assert placeholder.is_meta
    tensors.hold(layer, weights, CPU, holder="one")
    tensors.hold(layer, weights, CPU, holder="two")
    assert tensors.device_in_use == CPU
    tensors.let_go(layer, weights, holder="two")
    tensors.let_go(layer, weights, holder="two")  # it has
    assert not layer.weight.is_meta
    tensors.let_go(layer, weights, holder="one")
    assert layer.weight is placeholder
    assert tensors.device_in_use is None


def test_a_hold_by_hand_ends_with_the_next_forward():
    layer = nn.Linear(2, 2)
    weights = dict(layer.state_dict())
    tensors = OffloadedTensors(Residents(), "")
    tensors.take(layer, ["weight"], weights)
    tensors.hold(layer, weights, CPU)
    tensors.hold(layer, weights, CPU, holder="one")
    tensors.let_go(layer, weights, holder="one")
    assert layer.weight.is_meta
    tensors.let_go(layer, weights)
    assert layer.weight.is_meta


def test_a_failure_while_offloading_leaves_the_module_whole(monkeypatch):
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    place, calls = offloaded.place, []

    def fails_once(old, value, device, **options):
        if device.type == "meta":
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError
        return place(old, value, device, **options)

    monkeypatch.setattr(offloaded, "place", fails_once)
    with pytest.raises(MemoryError):
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert torch.equal(layer.weight, weight)
    assert not layer.bias.is_meta
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
)
def test_tensors_differ_by_their_bytes(dtype):
    one = torch.ones(2, 3).to(dtype)
    assert not differs(one, one.clone())
    assert differs(one, torch.zeros(2, 3).to(dtype))
    assert not differs(one[:, :2], one[:, :2].clone())


def test_nan_is_no_difference_and_an_empty_tensor_is_none():
    nan = torch.tensor([float("nan"), 1.0])
    assert not differs(nan, nan.clone())
    assert not differs(torch.empty(0), torch.empty(0))
    assert not differs(torch.tensor(1.0), torch.tensor(1.0))
    assert differs(torch.tensor(1.0), torch.tensor(2.0))


@pytest.mark.parametrize("with_map", [False, True])
def test_offloading_twice_is_refused_by_name_and_changes_nothing(x, with_map):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = model(x)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    hook = model[0]._hf_hook
    with pytest.raises(ValueError, match=r"0\.weight is offloaded already.*remove_hook_from_module"):
        attach_align_device_hook(
            model, execution_device="cpu", offload=True, weights_map=weights if with_map else None
        )
    assert model[0]._hf_hook is hook
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("preload", [[], ["Tied"]])
def test_a_loaded_state_dict_reaches_every_name_of_a_tie(tied, assign, preload, offloaded, writable):
    tied.requires_grad_(False)
    ids = torch.tensor([1, 2])
    weights = writable(tied.state_dict())
    new = {name: torch.rand_like(value) for name, value in tied.state_dict().items()}
    new["head.weight"] = new["embed.weight"]
    expected = torch.func.functional_call(tied, new, (ids,))
    offloaded(tied, weights_map=weights, preload_module_classes=preload)
    assert not any(tied.load_state_dict(new, assign=assign))
    torch.testing.assert_close(tied(ids), expected)
    torch.testing.assert_close(dict(tied.state_dict()), new)


def test_what_a_state_dict_lacks_or_has_besides_is_said_and_the_rest_takes_effect(x, net, offloaded):
    model = offloaded(net())
    kept = model.state_dict()["2.bias"].clone()
    given = {name: torch.rand_like(value) for name, value in net().state_dict().items() if name != "2.bias"}
    found = model.load_state_dict({**given, "other": torch.ones(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["2.bias"], ["other"])
    torch.testing.assert_close(dict(model.state_dict()), {**given, "2.bias": kept})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*2\.bias"):
        model.load_state_dict(given)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**given, "2.bias": kept, "0.weight": torch.ones(5, 4)})
    torch.testing.assert_close(dict(model.state_dict()), {**given, "2.bias": kept})
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("assign", [False, True])
def test_children_of_a_block_are_loaded_without_a_warning_that_they_are_not(net, offloaded, assign):
    model = nn.Sequential(nn.MultiheadAttention(4, 2), net(), nn.MultiheadAttention(4, 2)).requires_grad_(
        False
    )
    offloaded(model)
    new = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(model.load_state_dict(new, assign=assign))
        torch.testing.assert_close(dict(model.state_dict()), new)
        with pytest.raises(RuntimeError, match=r"size mismatch for 2\.out_proj\.bias"):
            model.load_state_dict({**new, "2.out_proj.bias": torch.ones(5)})
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), new)


def test_a_batch_norm_keeps_its_count_when_the_state_dict_lacks_it(offloaded):
    norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked.fill_(7)
    offloaded(norm, offload_buffers=True)
    norm.load_state_dict({"weight": torch.full((2,), 3.0)}, strict=False)
    norm.load_state_dict({}, strict=False)
    state = norm.state_dict()
    assert state["num_batches_tracked"] == 7
    assert state["weight"].tolist() == [3, 3]


def test_buffers_that_stayed_where_the_module_ran_go_back_with_it(fake):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    attach_align_device_hook(model, execution_device=fake.device, offload=True)
    assert model[0].running_mean.device == fake.device
    remove_hook_from_module(model, recurse=True)
    assert {tensor.device for tensor in model.state_dict().values()} == {CPU}


def tied_pair() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).requires_grad_(False)
    model[1].weight = model[0].weight
    return model


def test_a_change_that_torch_does_not_count_reaches_a_map_that_keeps_each_name_by_itself(offloaded):
    model = tied_pair()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, weights_map=weights)
    for layer in (model[1], model[0]):
        with align_module_device(layer):
            layer.weight.data.zero_().add_(3)
            layer.weight.data.mul_(2)
        assert weights["0.weight"].tolist() == weights["1.weight"].tolist() == [[6, 6], [6, 6]]


def test_a_name_that_was_given_a_weight_of_its_own_is_not_written_with_its_former_twin(offloaded):
    model = offloaded(tied_pair())
    with align_module_device(model[1]):
        model[1].weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    model[0].weight.fill_(5)
    assert model.state_dict()["0.weight"].tolist() == [[5, 5], [5, 5]]
    assert model.state_dict()["1.weight"].tolist() == [[0, 0], [0, 0]]


def test_removing_the_hooks_takes_the_newest_value_and_ties_what_was_on_several_devices(fake):
    model = tied_pair()
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"0": fake.device, "1": fake.device},
        offload={"0": True, "1": False},
        weights_map={"0.weight": model[0].weight.detach()},
    )
    model[1].weight.fill_(4)  # stays on the device, and may be trained
    remove_hook_from_module(model, recurse=True)
    assert model[0].weight is model[1].weight
    assert model[0].weight.tolist() == [[4, 4], [4, 4]]


def test_an_attach_may_send_the_output_back(fake):
    model = nn.Sequential(nn.Linear(2, 2))
    attach_align_device_hook(model, execution_device=fake.device, offload=True, io_same_device=True)
    assert model(torch.ones(1, 2)).device == CPU
    root = nn.Linear(2, 2)  # has weights of its own
    attach_align_device_hook(root, execution_device=fake.device, offload=True, io_same_device=True)
    assert root(torch.ones(1, 2)).device == CPU
    remove_hook_from_module(root)
    assert root.weight.device == CPU


def test_an_offloaded_tensor_is_put_on_a_device_with_its_value(offloaded, net):
    plain, model = net(), offloaded(net())
    set_module_tensor_to_device(model, "0.weight", "cpu")
    assert not model[0].weight.is_meta
    assert torch.equal(model[0].weight, plain[0].weight)
    x = torch.ones(1, 4)
    assert torch.equal(model(x), plain(x))
    model[0].weight.zero_()
    assert not model.state_dict()["0.weight"].any()


def test_where_a_value_is_kept_is_told_without_reading_it():
    class Unread(dict):
        def __getitem__(self, key):
            raise AssertionError(key)

    model = nn.Sequential(nn.Linear(2, 2))
    weights = Unread(model.state_dict())
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    home, key = home_behind(model[0].bias)
    assert home is weights
    assert key == "0.bias"
