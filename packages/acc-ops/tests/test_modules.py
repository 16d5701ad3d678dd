"""Looking into modules."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from acc_ops.modules import (
    check_device_same,
    get_model_tp_size,
    get_module_children_bottom_up,
    get_non_persistent_buffers,
    id_tensor_storage,
    is_peft_model,
    model_has_dtensor,
    named_module_tensors,
)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("kept", torch.zeros(1))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.inner = Inner()
        self.register_buffer("top", torch.zeros(1), persistent=False)


def names(*args, **kwargs):
    return [name for name, _ in named_module_tensors(*args, **kwargs)]


def test_parameters_come_before_buffers():
    assert names(Outer()) == ["weight", "top"]
    assert names(Outer(), recurse=True) == [
        "weight",
        "inner.linear.weight",
        "top",
        "inner.scratch",
        "inner.kept",
    ]


def test_buffers_can_be_left_out():
    assert names(Outer(), include_buffers=False, recurse=True) == ["weight", "inner.linear.weight"]
    assert names(Outer(), recurse=True, remove_non_persistent=True) == [
        "weight",
        "inner.linear.weight",
        "inner.kept",
    ]
    assert names(Outer(), remove_non_persistent=True) == ["weight"]


def test_non_persistent_buffers_are_a_new_set():
    model = Outer()
    found = get_non_persistent_buffers(model, recurse=True)
    assert found == {"top", "scratch"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"top", "inner.scratch"}
    got = get_non_persistent_buffers(model)
    got.add("x")
    assert get_non_persistent_buffers(model) == {"top"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_identity(device):
    tensor = torch.zeros(4, 4, device=device)
    same = [tensor.view(16), tensor[1:], tensor.T, tensor.detach(), nn.Parameter(tensor)]
    assert {id_tensor_storage(other) for other in same} == {id_tensor_storage(tensor)}
    assert id_tensor_storage(torch.zeros(4, 4, device=device)) != id_tensor_storage(tensor)


def test_empty_tensors_do_not_share():
    first, second = torch.zeros(0), torch.zeros(0)
    assert id_tensor_storage(first) != id_tensor_storage(second)
    assert id_tensor_storage(first) == id_tensor_storage(first.view(0, 3))


def test_storage_identity_names_device_and_bytes():
    device, _, nbytes = id_tensor_storage(torch.zeros(3))
    assert (device, nbytes) == (torch.device("cpu"), 12)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", torch.device("cpu", 0), True),
        ("cpu", "meta", False),
        ("xpu", "cuda", False),
    ],
)
def test_a_missing_index_is_zero(first, second, same):
    assert check_device_same(first, second) is same
    assert check_device_same(torch.device(second), torch.device(first)) is same


def test_children_come_before_parents_and_once():
    model = Outer()
    model.again = model.inner.linear
    pairs = get_module_children_bottom_up(model, return_fqns=True)
    assert pairs == [("inner.linear", model.inner.linear), ("inner", model.inner), ("", model)]
    assert get_module_children_bottom_up(model) == [module for _, module in pairs]


def test_a_very_deep_model_is_walked():
    model = nn.Linear(1, 1)
    for _ in range(3000):
        model = nn.Sequential(model)
    assert len(get_module_children_bottom_up(model)) == 3001


def test_a_plain_model_has_no_dtensor():
    assert not model_has_dtensor(Outer())


def test_a_dtensor_is_seen(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=nn.Parameter))
    assert model_has_dtensor(Outer())


def test_the_tensor_parallel_size_is_where_models_keep_it():
    model = Outer()
    assert get_model_tp_size(model) is None
    model.config = SimpleNamespace(distributed_config={"tp_size": 2})
    assert get_model_tp_size(model) == 2
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(tp_size=3))
    assert get_model_tp_size(model) == 3
    model.tp_size = 4
    assert get_model_tp_size(model) == 4


def test_a_peft_model_is_recognised_in_its_wrappers(monkeypatch):
    assert not is_peft_model(Outer())
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=Outer))
    assert is_peft_model(Outer())
    assert is_peft_model(nn.DataParallel(Outer()))
    assert not is_peft_model(Inner())
