"""Models without memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from acc_bigmodel import find_tied_parameters, init_empty_weights, init_on_device
from acc_ops.environment import patch_environment


class Marked(nn.Parameter):
    pass


def test_weights_tied_inside_are_tied() -> None:  # case big/14
    with init_empty_weights():
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
        model[1].weight = model[0].weight
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_meta
    assert find_tied_parameters(model) == [["0.weight", "1.weight"]]


def test_one_real_parameter_registered_twice_stays_one() -> None:
    shared = nn.Parameter(torch.ones(2, 2))
    with init_empty_weights():
        first, second = nn.Module(), nn.Module()
        first.register_parameter("weight", shared)
        second.register_parameter("weight", shared)
    assert first.weight is second.weight
    assert not shared.is_meta


def test_class_attributes_dtype_and_gradient_flag_are_kept() -> None:  # case big/15
    module = nn.Module()
    weight = Marked(torch.zeros(4, 4, dtype=torch.bfloat16).t(), requires_grad=False)
    weight.no_weight_decay = True
    with init_empty_weights():
        module.weight = weight
    assert type(module.weight) is Marked
    assert module.weight.is_meta
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.stride() == (1, 4)
    assert not module.weight.requires_grad
    assert module.weight.no_weight_decay


def test_other_threads_build_real_models_meanwhile() -> None:  # case big/17
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with init_empty_weights():
            inside.set()
            done.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(5)
    meanwhile = nn.Linear(2, 2).weight.device.type
    done.set()
    thread.join()
    assert (meanwhile, nn.Linear(2, 2).weight.device.type) == ("cpu", "cpu")


def test_overlapping_threads_leave_nothing_behind() -> None:  # case big/17
    together, first_left = threading.Barrier(2), threading.Event()

    def work(last: bool) -> None:
        with init_empty_weights():
            together.wait(5)
            if last:
                first_left.wait(5)
                assert nn.Linear(2, 2).weight.is_meta
        first_left.set()

    threads = [threading.Thread(target=work, args=(last,)) for last in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not nn.Linear(2, 2).weight.is_meta


def test_an_exception_ends_the_context() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers=True):
        1 / 0
    assert not nn.BatchNorm1d(2).weight.is_meta
    assert not torch.ones(1).is_meta


def test_buffers_are_real_unless_asked_for() -> None:
    with init_empty_weights():
        without = nn.BatchNorm1d(2)
    with init_empty_weights(include_buffers=True):
        included = nn.BatchNorm1d(2)
    assert (without.running_mean.is_meta, included.running_mean.is_meta) == (False, True)


def test_the_environment_decides_about_buffers_when_nobody_says() -> None:
    with patch_environment(ACCELERATE_INIT_INCLUDE_BUFFERS="true"), init_empty_weights():
        assert nn.BatchNorm1d(2).running_mean.is_meta


def test_contexts_nest() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert (inner.weight.is_meta, outer.weight.is_meta) == (False, True)


def test_modules_of_many_kinds_can_be_built() -> None:
    with init_empty_weights():
        modules: list[nn.Module] = [
            nn.LSTM(3, 4),
            nn.MultiheadAttention(4, 2),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2),
            nn.LazyLinear(3),
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        ]
    for module in modules:
        assert all(
            parameter.device.type == "meta"
            for parameter in module.parameters()
            if not nn.parameter.is_lazy(parameter)
        )


def test_the_model_of_a_shape_equals_the_real_one(new_model: Callable[[], nn.Module]) -> None:
    with init_empty_weights():
        empty = new_model()
    real = new_model()
    assert {name: value.shape for name, value in empty.state_dict().items()} == {
        name: value.shape for name, value in real.state_dict().items()
    }


def test_filling_is_skipped_on_meta_only_and_only_here() -> None:
    with init_empty_weights():
        buffer = torch.empty(3).fill_(2.0)
        nn.init.constant_(buffer, 4.0)
        weight = nn.Linear(3, 3).weight
        assert nn.init.normal_(weight) is weight
        assert nn.init.trunc_normal_(weight) is weight
        assert nn.init.xavier_uniform_(tensor=weight) is weight
        assert weight.data.zero_().is_meta
    assert buffer.tolist() == [4.0] * 3


def test_building_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from torch import nn; from acc_bigmodel import init_empty_weights\n"
        "with init_empty_weights(): nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
