"""A model's `forward` inside a context, without a reference cycle, and put back exactly.

[Note: why the class and not the instance] `model.forward = something_bound_to(model)` is a reference cycle, so the model's memory would wait
for the garbage collector. Instead the model's class becomes a cached subclass whose `forward` does the work: the method is bound when it is
looked up, copies and pickles follow, `super()` and `isinstance` still hold, and undoing it is one assignment. What to do around the
forward is in the instance dictionary, so that copies keep it and a class that somebody put on top of ours (a hook, FSDP2) passes through
ours once it is undone.

    type(model)              a `Surrounded` subclass of the model's class        (removed by restore)
    model._acc_around        what is done around its forward                     (removed by restore)
    model._acc_own_forward_  only where the class cannot help: the forward somebody had put on the instance

Three kinds of model get a forward on the instance instead, cycle and all: one that has one there already, an `fx.GraphModule` (it
writes its class anew) and a parametrized module (`remove_parametrizations` looks one base down).
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from acc_ops.unwrap import register_unwrap_finalizer

_AROUND = "_acc_around"
_OWN = "_acc_own_forward_"
_NO_OWN = "class"  # the forward on the instance covers that of the class

_classes: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


class Around(Protocol):
    """Calls `forward` with the arguments, inside whatever it adds. Must be picklable."""

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward shall return."""


class Nested:
    """What is done around a forward, inside something else that is."""

    def __init__(self, outer: Around, inner: Around) -> None:
        self.outer, self.inner = outer, inner
        self.of_a_precision = getattr(outer, "of_a_precision", False)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`inner` gets the model's own `forward`."""
        return self.outer(functools.partial(self.inner, forward), *args, **kwargs)


def surround_forward(model: nn.Module, around: Around) -> nn.Module:
    """Let every forward of `model` run through `around`, instead of an earlier one. Returns `model`.

    Raises TypeError for a scripted module, whose class is not Python.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(model).__name__} is a scripted module, whose forward cannot be replaced: prepare the Python module and script it "
            "afterwards, or train it with mixed_precision='no' and enter torch.autocast in your loop"
        )
    if _AROUND in vars(model) or _passes_through(model):
        vars(model)[_AROUND] = around
    elif "forward" in vars(model) or _class_is_private(model):
        before = vars(model).get("forward", _NO_OWN)
        vars(model).update({_AROUND: around, _OWN: before})
        vars(model)["forward"] = types.MethodType(_instance_forward(model.forward), model)
    else:
        vars(model)[_AROUND] = around
        model.__class__ = _surrounded_class(type(model))
    return model


def surround_inside(model: nn.Module, around: Around) -> nn.Module:
    """The same, inside what the forwards of `model` run through already."""
    outer = around_of(model)
    return surround_forward(model, around if outer is None else Nested(outer, around))


def restore_forward(model: nn.Module) -> nn.Module:
    """Undo `surround_forward`; a model it never saw is left alone. Returns `model`."""
    vars(model).pop(_AROUND, None)
    before = vars(model).pop(_OWN, None)
    if before == _NO_OWN:
        vars(model).pop("forward", None)
    elif before is not None:
        vars(model)["forward"] = before
    base = vars(type(model)).get("_surrounded_base")
    if base is not None:
        model.__class__ = base
    return model


def _revert(model: nn.Module) -> None:
    restore_forward(model)


# so that extract_model_from_parallel(keep_fp32_wrapper=False) restores the models that bear our mark
register_unwrap_finalizer(_AROUND, _revert)


def around_of(model: nn.Module) -> Around | None:
    """What the forward of `model` runs through, if anything of ours."""
    return vars(model).get(_AROUND)


class Surrounded(nn.Module):
    """What every surrounded class adds to its base, besides `forward`."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps the base's own `__init_subclass__` (registries, checks) from seeing our subclass."""

    @property
    def _original_forward(self) -> Callable[..., Any]:
        """The forward below, bound; the specification's name for it."""
        return types.MethodType(_base_of(self).forward, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle looks classes up by name and would find the user's: reduce a twin of that class, and say that ours goes on top
        base = _base_of(self)
        twin = object.__new__(base)
        object.__setattr__(twin, "__dict__", vars(self))
        reduced: Any = twin.__reduce_ex__(max(2, protocol))
        rebuild, arguments, *rest = reduced
        return (_rebuild_surrounded, (rebuild, arguments), *rest)


def _rebuild_surrounded(rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> nn.Module:
    module = rebuild(*arguments)
    module.__class__ = _surrounded_class(type(module))
    return module


def _base_of(model: nn.Module) -> type[nn.Module]:
    return next(
        vars(cls)["_surrounded_base"] for cls in type(model).__mro__ if "_surrounded_base" in vars(cls)
    )


def _passes_through(model: nn.Module) -> bool:
    """Whether our class is there already, under another that was put on top of it."""
    return isinstance(model, Surrounded) and "forward" not in vars(model)


def _class_is_private(model: nn.Module) -> bool:
    return isinstance(model, torch.fx.GraphModule) or torch.nn.utils.parametrize.is_parametrized(model)


def _surrounded_class(base: type[nn.Module]) -> type[nn.Module]:
    found = _classes.get(id(base))  # the value holds the base, so the id is right as long as the entry lives
    if found is None:
        found = _classes[id(base)] = _new_surrounded_class(base)
    return found


def _new_surrounded_class(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        around = self.__dict__.get(_AROUND)
        if around is None:
            return base.forward(self, *args, **kwargs)
        return around(base.forward, self, *args, **kwargs)

    # torch.compile keeps its cache, and counts recompilations, per code object: one for each class
    forward.__code__ = forward.__code__.replace()
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
        "_surrounded_base": base,
        "forward": functools.update_wrapper(forward, base.forward),
    }
    return types.new_class(base.__name__, (Surrounded, base), exec_body=lambda space: space.update(names))


def _instance_forward(before: Callable[..., Any]) -> Callable[..., Any]:
    """A function to bind to a model; it finds the old forward there, so that a copy of the model calls its own."""

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        around, own = self.__dict__[_AROUND], self.__dict__[_OWN]
        if own == _NO_OWN:
            return around(type(self).forward, self, *args, **kwargs)
        return around(own, *args, **kwargs)

    forward.__doc__ = before.__doc__
    try:
        shown = inspect.signature(before)
    except (TypeError, ValueError):  # written in C
        return forward
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = shown.replace(parameters=[this, *shown.parameters.values()])  # type: ignore[attr-defined]
    return forward
