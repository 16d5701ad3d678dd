"""A surrounded forward: bound, copyable, free of cycles, and restored exactly."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from acc_plugins.precisions.forward import around_of, restore_forward, surround_forward


class Doubled:
    """Twice what the forward returns; counts nothing, so that copies are equal."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * self.factor


class Scale(nn.Module):
    """A model with a registry of subclasses, and a forward with a signature of its own."""

    registry: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        Scale.registry.append(cls)

    def __init__(self, by: float = 3.0) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: torch.Tensor, *, add: float = 0.0) -> torch.Tensor:
        """x times by."""
        return x * self.by + add


class Child(Scale):
    def forward(self, x: torch.Tensor, *, add: float = 0.0) -> torch.Tensor:
        return super().forward(x, add=add) + 1


ONE = torch.ones(())


def test_forward_runs_through_around_also_when_called_by_name() -> None:
    model = surround_forward(Scale(), Doubled())
    assert model(ONE).item() == 6
    assert model.forward(ONE, add=1.0).item() == 8


def test_surrounding_returns_the_same_object_and_keeps_its_type_for_others() -> None:
    model = Child()
    assert surround_forward(model, Doubled()) is model
    assert isinstance(model, Child)
    assert type(model).__name__ == "Child"
    assert model(ONE).item() == 8


def test_forward_is_a_bound_method_with_the_users_signature() -> None:
    model = Scale()
    signature, doc = inspect.signature(model.forward), model.forward.__doc__
    surround_forward(model, Doubled())
    assert inspect.ismethod(model.forward)
    assert model.forward.__self__ is model
    assert inspect.signature(model.forward) == signature
    assert model.forward.__doc__ == doc
    assert model._original_forward(ONE).item() == 3


def test_restoring_leaves_class_and_dictionary_as_they_were() -> None:
    model = Scale()
    before = dict(vars(model))
    restore_forward(surround_forward(model, Doubled()))
    assert type(model) is Scale
    assert dict(vars(model)) == before
    assert model(ONE).item() == 3
    assert around_of(model) is None


def test_restoring_a_model_never_surrounded_does_nothing() -> None:
    model = Scale()
    assert restore_forward(model) is model
    assert type(model) is Scale


def test_surrounding_again_replaces_the_first() -> None:
    model = surround_forward(surround_forward(Scale(), Doubled()), Doubled(5))
    assert model(ONE).item() == 15
    assert type(restore_forward(model)) is Scale


def test_a_surrounded_model_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = surround_forward(Scale(), Doubled())
        model(ONE)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_deep_copy_has_its_own_weights_and_the_same_treatment() -> None:
    model = surround_forward(Scale(), Doubled())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.by.fill_(100.0)
    assert twin(ONE).item() == 6
    assert type(twin) is type(model)
    assert type(restore_forward(twin)) is Scale
    assert model(ONE).item() == 200


def test_a_pickled_model_comes_back_surrounded() -> None:
    model = surround_forward(Scale(), Doubled())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(model, protocol))
        assert twin(ONE).item() == 6
        assert type(restore_forward(twin)) is Scale


def test_a_users_registry_does_not_see_the_derived_class() -> None:
    known = list(Scale.registry)
    surround_forward(Child(), Doubled())
    assert Scale.registry == known


def test_two_models_of_one_class_are_independent() -> None:
    first, second, plain = (
        surround_forward(Scale(), Doubled()),
        surround_forward(Scale(), Doubled(7)),
        Scale(),
    )
    assert [m(ONE).item() for m in (first, second, plain)] == [6, 21, 3]
    restore_forward(first)
    assert [m(ONE).item() for m in (first, second, plain)] == [3, 21, 3]


def test_a_forward_on_the_instance_is_surrounded_and_put_back() -> None:
    model = Scale()
    own = lambda x: x * 10 + model.by.detach()  # noqa: E731
    model.forward = own
    surround_forward(model, Doubled())
    assert inspect.ismethod(model.forward)
    assert inspect.signature(model.forward) == inspect.signature(own)
    assert model(ONE).item() == 26
    restore_forward(model)
    assert model.forward is own
    assert "_acc_around" not in vars(model)
    assert len(vars(model)) == len(vars(Scale())) + 1


def test_a_copy_of_a_model_with_an_instance_forward_uses_its_own_weights() -> None:
    model = Scale()
    model.forward = model.forward  # bound to this very model, as monkey patches are
    surround_forward(model, Doubled())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.by.fill_(100.0)
    assert twin(ONE).item() == 6


def test_an_exception_in_the_forward_passes_through_and_leaves_the_model_usable() -> None:
    model = surround_forward(Scale(), Doubled())
    with pytest.raises(TypeError):
        model(ONE, nonsense=1)
    assert model(ONE).item() == 6


def test_parametrized_models_and_graph_modules_work_and_are_restored() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.utils.parametrizations.weight_norm(linear)
    traced = torch.fx.symbolic_trace(nn.Linear(1, 1, bias=False))
    for model in (linear, traced):
        before = type(model)
        expected = model(torch.ones(1, 1))
        surround_forward(model, Doubled())
        assert torch.equal(model(torch.ones(1, 1)), expected * 2)
        restore_forward(model)
        assert torch.equal(model(torch.ones(1, 1)), expected)
        assert type(model) is before
        assert "forward" not in vars(model)
    nn.utils.parametrize.remove_parametrizations(linear, "weight")


def test_a_class_put_on_top_later_passes_through_once_restored() -> None:
    model = surround_forward(Scale(), Doubled())

    class OnTop(type(model)):  # what FSDP2 and hooks do
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) + 0.5

    model.__class__ = OnTop
    assert model(ONE).item() == 6.5
    restore_forward(model)
    assert model(ONE).item() == 3.5
    surround_forward(model, Doubled(4))
    assert model(ONE).item() == 12.5


def test_a_scripted_model_is_refused_with_a_way_out() -> None:
    scripted = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))
    with pytest.raises(TypeError, match="script it afterwards"):
        surround_forward(scripted, Doubled())


def test_unwrapping_through_acc_ops_restores_the_forward() -> None:
    from acc_ops.unwrap import extract_model_from_parallel

    model = surround_forward(Scale(), Doubled())
    assert around_of(extract_model_from_parallel(model)) is not None
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert type(model) is Scale
