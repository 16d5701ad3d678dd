from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from hooks_interrupts import interrupt_at
from torch import nn
from torch.nn.utils import prune

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    add_hook_to_module,
    lending,
    remove_hook_from_module,
)


def cast(module, storage=torch.bfloat16, append=False):
    return add_hook_to_module(module, LayerwiseCastingHook(storage, torch.float32, False), append=append)


class Own(ModelHook):
    def post_forward(self, module, output):
        return output


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
@pytest.mark.parametrize("others", [[], [Own], [AlignDevicesHook], [AlignDevicesHook, Own]])
def test_an_interrupt_anywhere_in_a_call_leaves_nothing_lent(kind, others, x):
    layer = cast(kind(4, 4).requires_grad_(False))
    loan = layer._hf_hook._loan
    for other in others:
        hook = other("cpu", offload=True) if other is AlignDevicesHook else other()
        add_hook_to_module(layer, hook, append=True)
    expected = layer(x)
    names = set(layer.__dict__)
    event = 0
    while interrupt_at(event, lambda: layer(x)):
        event += 1
        assert set(layer.__dict__) == names
        assert loan.users == set()
        assert loan.held == []
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
        assert {parameter.is_meta for parameter in layer.parameters()} == {AlignDevicesHook in others}
    assert event > 20
    torch.testing.assert_close(layer(x), expected)


def test_a_cast_that_fails_leaves_nothing_lent(monkeypatch, x):
    layer = cast(nn.Linear(4, 4).requires_grad_(False))
    casts = []

    def fails_at_the_second(tensor):
        casts.append(tensor)
        if len(casts) == 2:
            raise torch.OutOfMemoryError("full")
        return tensor.float()

    monkeypatch.setitem(lending._SHORT_CASTS, torch.float32, fails_at_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)
    assert not {"weight", "bias"} & set(layer.__dict__)
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()})
    assert not layer(x).any()


def test_a_recurrent_module_stays_converted_as_long_as_a_thread_computes_with_it(x):
    class Slow(nn.LSTM):
        def forward(self, x):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=lambda: self(x))
                other.start()
                other.join()
            return super().forward(x)[0]

    layer = Slow(4, 4).requires_grad_(False)
    expected = copy.deepcopy(layer).bfloat16().float()(x)
    cast(layer)
    torch.testing.assert_close(layer(x), expected)
    assert layer.weight_hh_l0.dtype == torch.bfloat16


def test_a_module_that_calls_itself_casts_once_and_ends_once(x):
    class Twice(nn.Linear):
        depth = 0

        def forward(self, x):
            self.depth += 1
            return super().forward(self(x) if self.depth == 1 else x)

    layer = cast(Twice(4, 4).requires_grad_(False))
    assert layer(x).dtype == torch.float32
    assert "weight" not in layer.__dict__


@pytest.mark.parametrize("first", ["cast", "offload"])
def test_statistics_of_an_offloaded_module_that_is_cast_go_home(first, x):
    layer = nn.BatchNorm1d(4).requires_grad_(False)
    expected = copy.deepcopy(layer)
    for _ in range(2):
        expected(x)
    offload = AlignDevicesHook("cpu", offload=True, offload_buffers=True)
    if first == "cast":
        cast(layer)
        add_hook_to_module(layer, offload, append=True)
    else:
        add_hook_to_module(layer, offload)
        cast(layer, append=True)
    for _ in range(2):
        layer(x)
    mean = layer.state_dict()["running_mean"]
    torch.testing.assert_close(mean.float(), expected.running_mean, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fails", [False, True])
def test_a_weight_that_is_cast_and_then_offloaded_is_stored_small_after_a_call(fails, x, read_only):
    class Layer(nn.Linear):
        def forward(self, x):
            assert self.weight.dtype == torch.float32
            if fails:
                raise RuntimeError("forward failed")
            return super().forward(x)

    layer = cast(Layer(4, 4).requires_grad_(False))
    weights = read_only(layer.state_dict())
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights), append=True)
    try:
        layer(x)
    except RuntimeError:
        assert fails
    assert layer.weight.is_meta
    assert layer.weight.dtype == layer.state_dict()["weight"].dtype == torch.bfloat16


# --- what is around a call, and copies -----------------------------------------------------------------------------


def weight_norm(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("make", [weight_norm, nn.utils.spectral_norm, pruned])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_weight_that_a_hook_of_torch_makes_before_the_forward_is_made_of_cast_ones(make, storage, x):
    layer = make(nn.Linear(4, 4).requires_grad_(False)).eval()
    expected = layer(x)
    cast(layer, storage)
    torch.testing.assert_close(layer(x), expected, rtol=0.2, atol=0.2)
    assert {parameter.dtype for parameter in layer.parameters()} == {storage}


def test_each_step_of_a_forward_that_is_a_generator_has_cast_weights(x):
    class Steps(nn.Linear):
        def forward(self, x):
            try:
                for _ in range(2):
                    x = super().forward((yield x) + x)
            except ValueError:
                yield super().forward(x)
            return "end"

    layer = cast(Steps(4, 4).requires_grad_(False))
    twin = copy.deepcopy(layer)
    remove_hook_from_module(twin)
    for steps, expected in ((layer(x), twin(x)), (layer(x), twin(x))):
        assert next(steps) is next(expected) is x
        assert "weight" not in layer.__dict__
        torch.testing.assert_close(steps.send(x), expected.send(x))
    torch.testing.assert_close(steps.throw(ValueError), expected.throw(ValueError))
    with pytest.raises(StopIteration, match="end"):
        next(steps)
    assert "weight" not in layer.__dict__


class Copied(nn.Linear):
    """Copies itself in its forward, and has a child without a hook."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.below = nn.BatchNorm1d(4)

    def forward(self, x):
        self.copies.append(self.copier(self))
        return self.below(super().forward(x))


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_in_the_forward_has_no_cast_tensors(copier, x):
    layer = cast(Copied().requires_grad_(False).eval())
    Copied.copies, Copied.copier = [], staticmethod(copier)
    layer(x)
    (other,) = Copied.copies
    for module in [other] if copier is copy.copy else other.modules():
        assert not {"weight", "bias", "running_mean"} & set(module.__dict__)
    assert other.weight.dtype == torch.bfloat16
