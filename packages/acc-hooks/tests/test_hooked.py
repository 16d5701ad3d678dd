from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from acc_hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)


class AddsOne(ModelHook):
    def post_forward(self, module, output):
        return output + 1


class Documented(nn.Module):
    """A module of the tests."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scales."""
        return x * scale


def test_forward_stays_a_bound_method_that_looks_like_the_original():
    module = Documented()
    plain = module.forward
    add_hook_to_module(module, AddsOne())
    forward = module.forward
    assert inspect.ismethod(forward)
    assert forward.__self__ is module
    assert forward.__name__ == "forward"
    assert forward.__doc__ == "Scales."
    assert forward.__wrapped__ is plain.__func__
    assert inspect.signature(forward) == inspect.signature(plain)
    assert module._old_forward == plain


def test_a_hooked_module_still_looks_like_its_class():
    module = add_hook_to_module(Documented(), AddsOne())
    kind = type(module)
    assert isinstance(module, Documented)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        Documented.__name__,
        Documented.__qualname__,
        Documented.__module__,
        Documented.__doc__,
    )
    assert repr(module) == repr(Documented())


def test_removal_leaves_class_and_instance_dictionary_as_they_were():
    layer = nn.Linear(2, 2)
    before = dict(layer.__dict__)
    add_hook_to_module(layer, ModelHook())
    add_hook_to_module(layer, ModelHook(), append=True)
    assert set(layer.__dict__) - set(before) == {"_hf_hook"}
    remove_hook_from_module(layer)
    assert layer.__dict__ == before
    assert type(layer) is nn.Linear


def test_two_modules_of_one_class_share_one_hooked_class():
    first, second = (add_hook_to_module(nn.Linear(2, 2), ModelHook()) for _ in range(2))
    assert type(first) is type(second)


def test_a_patch_of_the_class_reaches_a_hooked_module(monkeypatch):
    module = add_hook_to_module(Documented(), AddsOne())
    monkeypatch.setattr(Documented, "forward", lambda self, x: x * 10)
    assert module(torch.ones(1)).item() == 11


def test_the_users_subclass_checks_do_not_see_our_class():
    registered = []

    class Registered(nn.Module):
        def __init_subclass__(cls, **kwargs):
            registered.append(cls)

        def forward(self, x):
            return x

    class Child(Registered):
        pass

    add_hook_to_module(Child(), ModelHook())
    assert registered == [Child]


def test_super_in_the_users_forward_still_works():
    class Base(nn.Module):
        def forward(self, x):
            return x + 1

    class Child(Base):
        def forward(self, x):
            return super().forward(x) * 2

    assert add_hook_to_module(Child(), AddsOne())(torch.ones(1)).item() == 5


class Patched:
    def __init__(self, module):
        self.module = module

    def __call__(self, x, extra=0):
        return type(self.module).forward(self.module, x) + extra


def test_a_forward_somebody_put_on_the_instance_runs_under_the_hook_and_comes_back():
    module = Documented()
    own = lambda x, extra=5: x + extra  # noqa: E731
    module.forward = own
    add_hook_to_module(module, AddsOne())
    assert module(torch.ones(1)).item() == 7
    assert module(torch.ones(1), extra=0).item() == 2
    assert list(inspect.signature(module.forward).parameters) == ["x", "extra"]
    assert inspect.ismethod(module.forward)
    assert module._old_forward is own
    remove_hook_from_module(module)
    assert module.forward is own
    assert type(module) is Documented


def test_a_copy_of_a_patched_and_hooked_module_runs_its_own_forward():
    module = Documented()
    module.factor = nn.Parameter(torch.ones(1))

    def scaled(self, x):
        return x * self.factor

    module.forward = scaled.__get__(module)
    add_hook_to_module(module, AddsOne())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.factor.zero_()
    assert other(torch.ones(1)).item() == 1
    assert module(torch.ones(1)).item() == 2
    assert list(inspect.signature(other.forward).parameters) == ["x"]


def test_a_forward_patched_over_the_hook_keeps_it_in_the_chain():
    module = add_hook_to_module(Documented(), AddsOne())
    below = module.forward
    module.forward = lambda x: below(x) * 3
    assert module(torch.ones(1)).item() == 6
    remove_hook_from_module(module)
    assert module(torch.ones(1)).item() == 3


def test_unhooking_by_hand_gives_the_plain_forward():
    module = add_hook_to_module(Documented(), AddsOne())
    module.forward = module._old_forward
    del module._hf_hook
    del module._old_forward
    assert module(torch.ones(1)).item() == 1
    other = add_hook_to_module(Documented(), AddsOne())
    del other._hf_hook
    assert other(torch.ones(1)).item() == 1


def test_the_old_forward_can_be_replaced():
    module = add_hook_to_module(Documented(), AddsOne())
    module._old_forward = lambda x: x * 7
    assert module(torch.ones(1)).item() == 8


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_copy_of_a_hooked_module_is_hooked_and_uses_its_own_weights(copied, chained):
    layer = nn.Linear(3, 3)
    hook = AlignDevicesHook("cpu", io_same_device=True)
    add_hook_to_module(layer, SequentialHook(hook, ModelHook()) if chained else hook)
    x = torch.ones(1, 3)
    expected = layer(x)
    if copied == "deepcopy":
        other = copy.deepcopy(layer)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other._hf_hook is not layer._hf_hook
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(x).any()
    torch.testing.assert_close(layer(x), expected)
    remove_hook_from_module(other)
    assert type(other) is nn.Linear


class Reduced(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x):
        return x

    def __reduce__(self):
        return type(self), (self.size,)


def test_a_module_with_its_own_reduce_is_rebuilt_by_it():
    module = add_hook_to_module(Reduced(3), AddsOne())
    other = pickle.loads(pickle.dumps(module))
    assert isinstance(other, Reduced)
    assert other.size == 3
    assert other(torch.ones(1)).item() == 1


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_parametrized_module_keeps_its_class_and_loses_neither_hook_nor_parametrization():
    layer = nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2)
    expected = layer(x) / 2
    parametrize.register_parametrization(layer, "weight", Half())
    kind = type(layer)
    add_hook_to_module(layer, AddsOne())
    assert type(layer) is kind
    torch.testing.assert_close(layer(x), expected + 1)
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), expected + 1)
    remove_hook_from_module(layer)
    torch.testing.assert_close(layer(x), expected)
    assert type(layer) is nn.Linear


def test_a_parametrization_over_a_hook_survives_its_removal():
    layer = add_hook_to_module(nn.Linear(2, 2, bias=False), AddsOne())
    x = torch.ones(1, 2)
    expected = (layer(x) - 1) / 2
    parametrize.register_parametrization(layer, "weight", Half())
    torch.testing.assert_close(layer(x), expected + 1)
    remove_hook_from_module(layer)
    torch.testing.assert_close(layer(x), expected)


def test_a_graph_module_is_hooked_on_its_own_class():
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    graph = torch.fx.symbolic_trace(Net())
    kind = type(graph)
    add_hook_to_module(graph, AddsOne())
    assert type(graph) is kind
    assert graph(torch.ones(1)).item() == 3
    assert graph._old_forward(torch.ones(1)).item() == 2
    add_hook_to_module(graph, AddsOne(), append=True)
    assert graph(torch.ones(1)).item() == 4
    assert copy.deepcopy(graph)(torch.ones(1)).item() == 2  # a graph copies what it generates, no more
    remove_hook_from_module(graph)
    assert graph(torch.ones(1)).item() == 2
    add_hook_to_module(graph, AddsOne())
    assert graph(torch.ones(1)).item() == 3


def test_a_graph_module_that_was_regenerated_keeps_the_new_forward_after_removal():
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    graph = add_hook_to_module(torch.fx.symbolic_trace(Net()), AddsOne())
    next(node for node in graph.graph.nodes if node.op == "call_function").args = (
        next(node for node in graph.graph.nodes if node.op == "placeholder"),
        5,
    )
    graph.recompile()
    remove_hook_from_module(graph)
    assert graph(torch.ones(1)).item() == 5


def test_a_scripted_module_can_be_hooked():
    scripted = torch.jit.script(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    expected = scripted(x) + 1
    add_hook_to_module(scripted, AddsOne())
    torch.testing.assert_close(scripted(x), expected)
    remove_hook_from_module(scripted)
    torch.testing.assert_close(scripted(x), expected - 1)


def test_a_class_with_slots_and_a_metaclass_can_be_hooked():
    class Meta(type(nn.Module)):
        pass

    class Odd(nn.Module, metaclass=Meta):
        __slots__ = ("extra",)

        def forward(self, x):
            return x

    module = Odd()
    module.extra = 3
    add_hook_to_module(module, AddsOne())
    assert module(torch.ones(1)).item() == 2
    assert module.extra == 3
    assert isinstance(type(module), Meta)


def test_the_forward_hooks_of_a_module_find_its_weights(x, offload, read_only):
    layer = nn.Linear(4, 4)
    expected = layer.weight.detach().clone()
    weights = read_only(layer.state_dict())
    seen = []
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    layer.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    offload(layer, weights_map=weights)
    layer(x)
    assert len(seen) == 2
    assert all(torch.equal(weight, expected) for weight in seen)
    assert sorted(weights.asked) == ["bias", "weight"]  # fetched once
    assert layer.weight.is_meta
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 5))
    assert layer.weight.is_meta


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_weight_that_a_pre_hook_computes_is_right(x, appended, copier):
    layer = torch.nn.utils.weight_norm(nn.Linear(4, 4)).requires_grad_(False)
    expected = layer(x)
    if appended:
        add_hook_to_module(layer, AlignDevicesHook("cpu"))
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True), append=True)
    layer = copier(layer)
    layer.weight = torch.zeros(4, 4)
    torch.testing.assert_close(layer(x), expected)
    assert layer.weight_g.is_meta
    remove_hook_from_module(layer)
    assert type(layer) is nn.Linear
    torch.testing.assert_close(layer(x), expected)
