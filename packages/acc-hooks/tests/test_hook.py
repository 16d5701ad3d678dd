from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from acc_hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attached_hook,
    iterate_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Doubles(ModelHook):
    def pre_forward(self, module, x, **kwargs):
        return (x * 2,), kwargs


class AddsOne(ModelHook):
    def post_forward(self, module, output):
        return output + 1


class SeesGrad(nn.Module):
    def forward(self, x):
        return torch.is_grad_enabled()


def test_a_hook_gets_its_four_calls_in_order(recorder, x):
    hook = recorder()
    layer = nn.Linear(4, 4)
    assert add_hook_to_module(layer, hook) is layer
    layer(x)
    assert remove_hook_from_module(layer) is layer
    layer(x)
    assert hook.calls == ["hook.init", "hook.pre", "hook.post", "hook.detach"]


def test_pre_forward_changes_the_arguments_and_post_forward_the_output(x):
    layer = nn.Linear(4, 4)
    expected = layer(x * 2) + 1
    add_hook_to_module(layer, SequentialHook(Doubles(), AddsOne()))
    torch.testing.assert_close(layer(x), expected)


def test_a_second_hook_replaces_the_first_without_stacking(recorder, x):
    calls: list[str] = []
    layer = nn.Linear(4, 4)
    for name in "ab":
        add_hook_to_module(layer, recorder(name, calls))
    layer(x)
    assert calls == ["a.init", "a.detach", "b.init", "b.pre", "b.post"]
    assert layer._hf_hook.name == "b"


def test_an_appended_hook_runs_after_the_first_and_nothing_is_done_twice(recorder, x):
    calls: list[str] = []
    layer = nn.Linear(4, 4)
    first, second = recorder("a", calls), recorder("b", calls)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, second, append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert layer._hf_hook.hooks == (first, second)
    layer(x)
    remove_hook_from_module(layer)
    assert calls == ["a.init", "b.init", "a.pre", "b.pre", "a.post", "b.post", "a.detach", "b.detach"]


def test_appending_to_nothing_is_attaching(recorder):
    layer = nn.Linear(4, 4)
    hook = recorder()
    add_hook_to_module(layer, hook, append=True)
    assert layer._hf_hook is hook


def test_the_same_hook_can_be_appended_to_itself(x):
    layer = nn.Linear(4, 4)
    hook = AddsOne()
    expected = layer(x) + 2
    add_hook_to_module(layer, hook)
    add_hook_to_module(layer, hook, append=True)
    torch.testing.assert_close(layer(x), expected)


def test_iterate_hooks_sees_through_chains():
    a, b, c = ModelHook(), AddsOne(), Doubles()
    assert list(iterate_hooks(SequentialHook(SequentialHook(a, b), c))) == [a, b, c]
    assert list(iterate_hooks(None)) == []


def test_no_grad_holds_for_the_forward_only():
    layer = SeesGrad()
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(layer, hook)
    assert layer(None) is False
    assert torch.is_grad_enabled()


def test_no_grad_is_heard_inside_a_chain_whose_own_stays_false():
    quiet = ModelHook()
    quiet.no_grad = True
    chain = SequentialHook(ModelHook(), quiet)
    layer = add_hook_to_module(SeesGrad(), chain)
    assert layer(None) is False
    assert chain.no_grad is False


def test_no_grad_can_be_a_class_attribute():
    class Quiet(ModelHook):
        no_grad = True

    assert add_hook_to_module(SeesGrad(), Quiet())(None) is False


def test_a_hook_needs_no_init_of_its_base(x):
    class Bare(ModelHook):
        def __init__(self):
            self.seen = 0

        def pre_forward(self, module, *args, **kwargs):
            self.seen += 1
            return args, kwargs

    hook = Bare()
    add_hook_to_module(nn.Linear(4, 4), hook)(x)
    assert hook.seen == 1


def test_methods_set_on_a_hook_object_are_called(x):
    hook = ModelHook()
    layer = add_hook_to_module(nn.Linear(4, 4), hook)
    hook.post_forward = lambda module, output: "mine"
    assert layer(x) == "mine"


def test_the_hook_attribute_is_read_at_each_call(x):
    layer = add_hook_to_module(nn.Linear(4, 4), ModelHook())
    plain = layer(x)
    layer._hf_hook = AddsOne()
    torch.testing.assert_close(layer(x), plain + 1)


def test_what_is_not_a_hook_is_refused():
    with pytest.raises(TypeError, match="ModelHook, got int"):
        add_hook_to_module(nn.Linear(2, 2), 3)


def test_removing_from_a_module_without_a_hook_does_nothing(recorder):
    layer = nn.Linear(4, 4)
    before = dict(layer.__dict__)
    remove_hook_from_module(layer)
    remove_hook_from_module(layer)
    assert layer.__dict__ == before
    assert type(layer) is nn.Linear


def test_removing_takes_along_what_overrides_moving_methods_since_the_hook_is_there():
    layer = nn.Linear(4, 4)
    layer.to_empty = layer.cuda = mine = lambda *_: None
    add_hook_to_module(layer, ModelHook())
    add_hook_to_module(layer, ModelHook(), append=True)
    layer.to = layer.xpu = lambda *_: None
    remove_hook_from_module(layer)
    assert not {"to", "xpu"} & set(layer.__dict__)
    assert layer.to_empty is layer.cuda is mine


def test_a_module_without_a_hook_keeps_what_overrides_its_moving_methods():
    layer = nn.Linear(4, 4)
    layer.to = layer.cuda = lambda *_: None
    before = dict(layer.__dict__)
    remove_hook_from_module(layer, recurse=True)
    assert layer.__dict__ == before


def test_removal_can_descend(recorder):
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    for module in model.modules():
        add_hook_to_module(module, recorder("h", calls))
    remove_hook_from_module(model)
    assert calls.count("h.detach") == 1
    assert remove_hook_from_submodules(model) is None
    assert calls.count("h.detach") == 4
    assert all(attached_hook(module) is None for module in model.modules())


class Unloads(ModelHook):
    """Leaves a mark on the hook while a call runs."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def _enter(self, module, args, kwargs):
        self.log.append(f"{self.name}.enter")
        return args, kwargs, self.name

    def _leave(self, module, output, token):
        self.log.append(f"{token}.leave")
        return output

    def _abort(self, module, token):
        self.log.append(f"{token}.abort")


class Bad(ModelHook):
    def __init__(self, where: str) -> None:
        self.where = where

    def pre_forward(self, module, *args, **kwargs):
        if self.where == "pre":
            raise KeyboardInterrupt
        return args, kwargs

    def post_forward(self, module, output):
        if self.where == "post":
            raise KeyboardInterrupt
        return output


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("pre", ["a.enter", "a.abort"]),
        ("forward", ["a.enter", "b.enter", "a.abort", "b.abort"]),
        ("post", ["a.enter", "b.enter", "a.leave", "b.abort"]),
    ],
)
def test_each_hook_of_a_chain_ends_once_whatever_raises(where, expected, x):
    log: list[str] = []

    class Layer(nn.Module):
        def forward(self, x):
            if where == "forward":
                raise KeyboardInterrupt
            return x

    first, second = Unloads(log, "a"), Unloads(log, "b")
    for hook in (first, second):
        hook.pre_forward = hook.pre_forward  # not idle: its calls are its own
    layer = add_hook_to_module(Layer(), SequentialHook(first, Bad(where), second))
    with pytest.raises(KeyboardInterrupt):
        layer(x)
    assert log == expected


def test_deleting_a_hooked_model_frees_its_weights_at_once():
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        add_hook_to_module(model[0], SequentialHook(ModelHook(), AddsOne()))
        add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))
        model(torch.ones(1, 4))
        weight = weakref.ref(model[0].weight)
        del model
        assert weight() is None
    finally:
        gc.enable()


class HookedModel(RuleBasedStateMachine):
    """Any order of attaching, appending, replacing, removing, copying, pickling and failing leaves a right module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(4, 4)
        self.layer = copy.deepcopy(self.plain)
        self.keys = set(self.layer.__dict__)
        self.hooks: list[str] = []
        self.x = torch.ones(1, 4)

    def make(self, kind: str) -> ModelHook:
        if kind == "add":
            return AddsOne()
        if kind == "align":
            return AlignDevicesHook("cpu", io_same_device=True)
        if kind == "offload":
            return AlignDevicesHook("cpu", offload=True)
        if kind == "cast":
            return LayerwiseCastingHook(torch.float64, torch.float32, False)
        return ModelHook()

    kinds = st.sampled_from(["noop", "add", "align", "offload", "cast"])

    @rule(kind=kinds)
    def attach(self, kind: str) -> None:
        add_hook_to_module(self.layer, self.make(kind))
        self.hooks = [kind]

    @rule(kind=kinds)
    def append(self, kind: str) -> None:
        assume(not (kind == "offload" and "offload" in self.hooks))
        add_hook_to_module(self.layer, self.make(kind), append=True)
        self.hooks.append(kind)

    @rule()
    def remove(self) -> None:
        remove_hook_from_module(self.layer)
        self.hooks = []

    @rule()
    def deepcopy(self) -> None:
        self.layer = copy.deepcopy(self.layer)

    @rule()
    def pickle(self) -> None:
        self.layer = pickle.loads(pickle.dumps(self.layer))

    @rule()
    def fail(self) -> None:
        with pytest.raises(RuntimeError):
            self.layer(torch.ones(1, 5))

    @invariant()
    def computes(self) -> None:
        with torch.no_grad():
            expected = self.plain(self.x) + self.hooks.count("add")
            torch.testing.assert_close(self.layer(self.x), expected)

    @invariant()
    def is_whole(self) -> None:
        assert set(self.layer.__dict__) - self.keys == ({"_hf_hook"} if self.hooks else set())
        assert (type(self.layer) is nn.Linear) is (not self.hooks)
        state = self.layer.state_dict()
        assert not any(value.is_meta for value in state.values())
        torch.testing.assert_close(state["weight"].float(), self.plain.weight.detach())
        if not self.hooks:
            assert self.layer.weight.dtype == torch.float32
            assert self.layer.weight.device.type == "cpu"


HookedModel.TestCase.settings = settings(max_examples=40, stateful_step_count=12)
test_any_order_of_operations_leaves_a_right_module = HookedModel.TestCase


def test_a_method_that_forgets_to_return_the_module_is_named():
    class Forgets(ModelHook):
        def init_hook(self, module):
            module.marked = True

    layer = add_hook_to_module(nn.Linear(2, 2), ModelHook())
    with pytest.raises(TypeError, match=r"Forgets.init_hook must return the module, and returned None"):
        add_hook_to_module(layer, Forgets())
    assert type(layer) is nn.Linear


def test_removal_visits_a_shared_module_once(recorder):
    hook = recorder()
    layer = add_hook_to_module(nn.Linear(2, 2), hook)
    model = layer
    for _ in range(40):  # as many paths as 2**40
        model = nn.Sequential(model, model)
    remove_hook_from_submodules(model)
    assert hook.calls == ["hook.init", "hook.detach"]
