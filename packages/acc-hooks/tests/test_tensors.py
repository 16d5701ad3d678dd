from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_hooks import register_placer, set_module_tensor_to_device, tensors


class Marked(nn.Parameter):
    pass


def test_a_parameter_moves_and_keeps_its_flags_and_attributes():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    layer.weight._is_hf_initialized = True
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.is_meta
    assert layer.weight.requires_grad is False
    assert layer.weight._is_hf_initialized is True
    assert isinstance(layer.weight, nn.Parameter)


def test_a_value_replaces_what_was_there():
    layer = nn.Linear(2, 2, device="meta")
    value = torch.arange(4.0).reshape(2, 2)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert torch.equal(layer.weight, value)
    assert layer.weight.requires_grad


def test_a_dotted_name_reaches_into_submodules_and_buffers():
    model = nn.Sequential(nn.BatchNorm1d(3))
    set_module_tensor_to_device(model, "0.running_mean", "cpu", value=torch.ones(3))
    assert torch.equal(model[0].running_mean, torch.ones(3))
    assert "running_mean" in model[0]._buffers


def test_nothing_changes_when_the_tensor_is_there_already():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    set_module_tensor_to_device(layer, "weight", torch.device("cpu"))
    assert layer.weight is weight


@pytest.mark.parametrize(
    ("old", "value", "dtype", "expected"),
    [
        (torch.float16, torch.float32, None, torch.float16),
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, "float16", torch.float16),
        (torch.float32, torch.float32, "torch.float16", torch.float16),
        (torch.int64, torch.int64, torch.float16, torch.int64),
        (torch.bool, torch.bool, torch.float16, torch.bool),
        (torch.float32, torch.float64, None, torch.float32),
    ],
)
def test_a_value_takes_the_asked_or_the_old_dtype_and_integers_keep_theirs(old, value, dtype, expected):
    module = nn.Module()
    module.register_buffer("b", torch.zeros(2, dtype=old))
    set_module_tensor_to_device(module, "b", "cpu", value=torch.ones(2).to(value), dtype=dtype)
    assert module.b.dtype == expected


def test_a_parameter_class_of_the_users_is_kept():
    module = nn.Module()
    module.p = Marked(torch.zeros(2))
    module.p.note = "mine"
    set_module_tensor_to_device(module, "p", "cpu", value=torch.ones(2))
    assert type(module.p) is Marked
    assert module.p.note == "mine"
    assert torch.equal(module.p.detach(), torch.ones(2))


def test_strides_survive_a_move():
    module = nn.Module()
    module.p = nn.Parameter(torch.zeros(2, 3).t())
    set_module_tensor_to_device(module, "p", "meta")
    assert module.p.stride() == torch.zeros(2, 3).t().stride()


def test_a_parameter_registered_as_none_can_be_given_a_value():
    layer = nn.Linear(2, 2, bias=False)
    set_module_tensor_to_device(layer, "bias", "cpu")
    assert layer.bias is None
    set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(2))
    assert isinstance(layer.bias, nn.Parameter)


def test_wrong_requests_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.wait'.*weight, bias"):
        set_module_tensor_to_device(model, "0.wait", "cpu")
    with pytest.raises(AttributeError, match=r"'1.weight'"):
        set_module_tensor_to_device(model, "1.weight", "cpu")
    with pytest.raises(ValueError, match=r"'0.weight'.*\(3, 2\).*\(2, 2\)"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="no_such_dtype"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(2, 2), dtype="no_such_dtype")
    with pytest.raises(ValueError, match="nowhere"):
        set_module_tensor_to_device(model, "0.weight", "nowhere")
    set_module_tensor_to_device(model, "0.weight", "meta")
    with pytest.raises(ValueError, match=r"'0.weight'.*meta.*value"):
        set_module_tensor_to_device(model, "0.weight", "cpu")


def test_a_device_this_machine_lacks_is_a_clear_error():
    if torch.xpu.is_available():
        pytest.skip("this machine has an xpu")
    with pytest.raises(ValueError, match="'weight' cannot be put on xpu"):
        set_module_tensor_to_device(nn.Linear(2, 2), "weight", "xpu:0")


def test_the_tied_map_is_reused_where_filled_and_filled_where_empty():
    value = torch.ones(2, 2)
    cpu = torch.device("cpu")
    shared = {value.data_ptr(): {}}
    first, second = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    set_module_tensor_to_device(first, "weight", cpu, value=value, tied_params_map=shared)
    set_module_tensor_to_device(second, "weight", cpu, value=value, tied_params_map=shared)
    assert first.weight is second.weight is shared[value.data_ptr()][cpu]
    other = torch.zeros(2, 2)
    set_module_tensor_to_device(second, "weight", cpu, value=other, tied_params_map=shared)
    assert second.weight is not first.weight
    assert list(shared) == [value.data_ptr()]


def test_statistics_of_an_8_bit_weight_become_its_scb():
    layer = nn.Linear(2, 2, device="meta")
    statistics = torch.ones(2, dtype=torch.float16)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), fp16_statistics=statistics)
    assert torch.equal(layer.weight.SCB, statistics)
    assert not hasattr(layer.bias, "SCB")


class Int8Params(nn.Parameter):
    """Like bitsandbytes': quantises itself on the way to a device, and needs its flags for that."""

    def __new__(cls, data=None, requires_grad=True, has_fp16_weights=False, SCB=None):
        new = torch.Tensor._make_subclass(cls, data, requires_grad)
        new.has_fp16_weights, new.SCB, new.moved_from = has_fp16_weights, SCB, None
        return new

    def to(self, *args, **kwargs):
        new = Int8Params(super().to(*args, **kwargs), self.requires_grad, self.has_fp16_weights, self.SCB)
        new.moved_from = self.device
        return new


def test_quantised_parameters_are_rebuilt_on_the_cpu_with_their_flags_and_move_themselves():
    module = nn.Module()
    module.p = Int8Params(torch.ones(2, 2, dtype=torch.float16), requires_grad=False, has_fp16_weights=True)
    value = torch.ones(2, 2, dtype=torch.int8)
    set_module_tensor_to_device(module, "p", "cpu", value=value)
    assert type(module.p) is Int8Params
    assert module.p.dtype == torch.int8
    assert module.p.has_fp16_weights is True
    assert module.p.moved_from == torch.device("cpu")
    set_module_tensor_to_device(module, "p", "meta")
    assert module.p.is_meta


def test_a_tensor_that_wraps_others_moves_whole():
    from torch.testing._internal.two_tensor import TwoTensor

    module = nn.Module()
    module.p = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    module.p.requires_grad_(False)
    set_module_tensor_to_device(module, "p", "meta")
    assert module.p.is_meta
    assert isinstance(module.p, TwoTensor)
    set_module_tensor_to_device(module, "p", "cpu", value=TwoTensor(torch.ones(2), torch.ones(2)))
    assert torch.equal(module.p.b, torch.ones(2))
    assert module.p.requires_grad is False


def test_a_registered_placer_serves_its_class(monkeypatch):
    monkeypatch.setattr(tensors, "_placers", list(tensors._placers))
    asked = []

    def placer(placement):
        asked.append(placement.device)
        return nn.Parameter(placement.value.to(placement.device) * 2)

    register_placer(lambda placement: type(placement.old) is Marked, placer)
    module = nn.Module()
    module.p = Marked(torch.zeros(2))
    set_module_tensor_to_device(module, "p", "cpu", value=torch.ones(2))
    assert module.p.tolist() == [2, 2]
    assert asked == [torch.device("cpu")]


def test_a_recurrent_module_computes_with_the_new_weights():
    lstm = nn.LSTM(2, 3)
    x = torch.ones(4, 1, 2)
    before = lstm(x)[0]
    for name, parameter in list(lstm.named_parameters()):
        set_module_tensor_to_device(lstm, name, "cpu", value=torch.zeros_like(parameter))
    assert before.any()
    assert not lstm(x)[0].any()


def test_a_value_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, got 5.0"):
        set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", value=5.0)
