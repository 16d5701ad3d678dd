"""How a module comes to run its hook: its class becomes a subclass whose forward asks `_hf_hook`.

[Note: where the hook lives]
`module.__class__` is swapped for a cached subclass `(Hooked, base)` with the base's name. So `module.forward` is a real
bound method of the instance, nothing in the instance points back at it, and deepcopy, pickle and `inspect` work by
themselves. The instance dictionary gains exactly one key, `_hf_hook`, which is read on every call.

    type(module)            Hooked subclass on top of the module's class      (removed with the hook)
    module._hf_hook         the hook                                         (removed with the hook)
    module._old_forward     a property: the forward below the hook
    OWN_FORWARD             a forward somebody had put on the instance, kept while the hook is there

Three kinds of module cannot take a class on top:
- a parametrized module gets it *below* its own private class (`remove_parametrizations` looks one base down);
- an `fx.GraphModule` has a private class and re-generates `forward` on it: the wrapper goes on that class;
- a class that somebody swapped in over ours (FSDP2, parametrize) stays: without a hook our forward is a pass-through.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_hooks.borrowing import converting
from acc_hooks.copying import placeholders_below, without_placeholders
from acc_hooks.inputs import are_on, bring_back
from acc_hooks.loading import whole_load

if TYPE_CHECKING:
    from .hook import ModelHook

HOOK = "_hf_hook"
OWN_FORWARD = "_acc_own_forward"

_classes: weakref.WeakValueDictionary[tuple[int, type], type] = weakref.WeakValueDictionary()


class Hooked(nn.Module):
    """What every hooked class adds to its base: the wrapped forward, a `_old_forward`, a state dict without placeholders."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps the base's own `__init_subclass__` (registries, checks) from seeing our subclass."""

    @property
    def _old_forward(self) -> Callable[..., Any]:
        return forward_below(self)

    @_old_forward.setter
    def _old_forward(self, forward: Callable[..., Any]) -> None:
        self.__dict__[OWN_FORWARD] = forward
        _specialise(self)

    @_old_forward.deleter
    def _old_forward(self) -> None:
        """Code that unhooks by hand deletes it; there is nothing stored to delete."""

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks for what it compiles; it does not know varargs, nor hooks."""
        raise RuntimeError(
            f"{type(self).__name__} has a hook, and torch.jit.script cannot compile hooks: call "
            "remove_hook_from_module(model, recurse=True) first, or use torch.jit.trace"
        )

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        _specialise(self)
        for child in self._modules.values():  # copied by code that is not ours
            for below in child.modules() if child is not None else ():
                for name in _casts(below.__dict__):
                    del below.__dict__[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        top = type(self)
        if "_hooked_base" not in top.__dict__ or not isinstance(reduced, tuple):
            return reduced
        base = top.__dict__["_hooked_base"]
        rebuild, arguments, *rest = reduced
        arguments = tuple(base if part is top else part for part in arguments)
        below = placeholders_below(self, lambda child: HOOK in child.__dict__)
        hook = self.__dict__.get(HOOK)
        if hook is not None and rest and isinstance(rest[0], dict):
            rest[0] = without_placeholders(_without_casts(rest[0]), hook._held_placeholders())
        return (
            _rebuild_hooked,
            (base if rebuild is top else rebuild, arguments, isinstance(self, HookedAndHeld), below),
            *rest,
        )

    def __copy__(self) -> Any:
        below = getattr(super(), "__copy__", None)
        if below is not None:
            return below()
        new = type(self).__new__(type(self))
        super(Hooked, new).__setstate__(_without_casts(dict(self.__dict__)))
        _specialise(new)
        return new

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        destination = super().state_dict(*args, **kwargs)
        hook = self.__dict__.get(HOOK)
        if hook is not None and isinstance(destination, dict):
            prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
            hook._fill_state_dict(self, destination, prefix)
        return destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with whole_load():
            return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        hook = self.__dict__.get(HOOK)
        if hook is None:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            return
        with hook._loading_state_dict(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class HookedAndHeld(Hooked):
    """What a module whose weights are there, or in their dtype, only while it runs has besides: torch's hooks find them too."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._forward_pre_hooks or self._forward_hooks):
            return super().__call__(*args, **kwargs)
        hook = self.__dict__.get(HOOK)
        if hook is None:
            return super().__call__(*args, **kwargs)
        with hook._around_call(self):
            return super().__call__(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        with converting():
            return super()._apply(fn, recurse)


def wrap(module: nn.Module, hook: ModelHook) -> None:
    """Make `module` run `hook` around its forward; a module that is wrapped already only gets the new hook."""
    is_held = hook._is_around_call()
    top = type(module).__dict__
    if not is_wrapped(module):
        if "forward" in module.__dict__:
            module.__dict__[OWN_FORWARD] = module.__dict__.pop("forward")
        _swap_class(module, is_held)
    elif isinstance(module, HookedAndHeld) is not is_held:
        if "_hooked_base" in top:
            module.__class__ = top["_hooked_base"]
            _swap_class(module, is_held)
        elif len(type(module).__bases__) == 1:
            _put_below(type(module), is_held)
    module.__dict__[HOOK] = hook


def unwrap(module: nn.Module) -> None:
    """Give `module` back its class and its instance dictionary; our class stays where another lies on top of it."""
    module.__dict__.pop(HOOK, None)
    top: Any = type(module)
    graph = top.__dict__.get("_hooked_graph")
    if graph is not None:
        if top.forward is graph.wrapper:  # else it was re-generated meanwhile
            top.forward = graph.forward
        del top._hooked_graph
    elif "_hooked_base" in top.__dict__:
        module.__class__ = top.__dict__["_hooked_base"]
    else:
        return  # no class of ours, or one below another: without a hook it only passes through
    if OWN_FORWARD in module.__dict__ and "forward" not in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(OWN_FORWARD)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a hook put on `module` now would be run by its forward."""
    if isinstance(module, torch.fx.GraphModule):
        return "_hooked_graph" in type(module).__dict__
    return isinstance(module, Hooked)


def forward_below(module: nn.Module) -> Callable[..., Any]:
    """The forward that runs under the hook, bound to `module`."""
    own = module.__dict__.get(OWN_FORWARD)
    if own is not None:
        return own
    graph = type(module).__dict__.get("_hooked_graph")
    if graph is not None:
        return types.MethodType(graph.forward, module)
    base = next(
        cls.__dict__["_hooked_base"] for cls in type(module).__mro__ if "_hooked_base" in cls.__dict__
    )
    return types.MethodType(_owner_of_forward(base).forward, module)


def _swap_class(module: nn.Module, is_held: bool) -> None:
    base: Any = type(module)
    if isinstance(module, torch.fx.GraphModule):  # its class, and the forward on it, are this module's alone
        _put_below(base, is_held)
        graph = types.SimpleNamespace(forward=base.forward)
        base.forward = graph.wrapper = functools.update_wrapper(_make_forward(graph), graph.forward)
        base._hooked_graph = graph
    elif torch.nn.utils.parametrize.is_parametrized(module) and len(base.__bases__) == 1:
        _put_below(base, is_held)
    else:
        module.__class__ = _hooked_class(base, is_held)
        _specialise(module)


def _put_below(private_class: type, is_held: bool) -> None:
    (base,) = private_class.__bases__
    if not issubclass(base, _mixin(is_held)) or (issubclass(base, HookedAndHeld) and not is_held):
        base = base.__dict__.get("_hooked_base", base)
        private_class.__bases__ = (_hooked_class(base, is_held),)


def _specialise(module: nn.Module) -> None:
    """A module with a forward of its own needs a hooked class of its own: the signatures differ."""
    own = module.__dict__.get(OWN_FORWARD)
    base = type(module).__dict__.get("_hooked_base")
    if own is not None and base is not None:
        module.__class__ = _new_hooked_class(base, own, _mixin(isinstance(module, HookedAndHeld)))


def _casts(state: Mapping[str, Any]) -> set[str]:
    """Names of cast copies that a casting hook lent for a call: what lies before a parameter or buffer in the dictionary."""
    tensors = {**(state.get("_parameters") or {}), **(state.get("_buffers") or {})}
    return tensors.keys() & state.keys()


def _without_casts(state: dict[str, Any]) -> dict[str, Any]:
    casts = _casts(state)
    return {name: value for name, value in state.items() if name not in casts} if casts else state


def _mixin(is_held: bool) -> type[Hooked]:
    return HookedAndHeld if is_held else Hooked


def _rebuild_hooked(
    rebuild: Callable[..., Any],
    arguments: tuple[Any, ...],
    is_held: bool,
    below: Any = None,  # noqa: ARG001 - only had to be stored first
) -> Any:
    """Unpickle: what `rebuild` made of the base class, with the class swapped again (never pickled itself)."""
    module = rebuild(*arguments)
    module.__class__ = _hooked_class(type(module), is_held)
    return module


def _hooked_class(base: type, is_held: bool) -> type:
    mixin = _mixin(is_held)
    key = (id(base), mixin)  # the value holds the base, so the id is right as long as the entry lives
    hooked = _classes.get(key)
    if hooked is None:
        hooked = _classes[key] = _new_hooked_class(base, None, mixin)
    return hooked


def _new_hooked_class(base: Any, own_forward: Callable[..., Any] | None, mixin: type[Hooked]) -> type:
    forward: Any
    if own_forward is None:
        owner = _owner_of_forward(base)
        forward = functools.update_wrapper(_make_forward(owner), owner.forward)
    else:
        forward = _look_like(_make_own_forward(), own_forward)
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__slots__": (),
        "_hooked_base": base,
        "forward": forward,
    }
    return types.new_class(base.__name__, (mixin, base), exec_body=lambda namespace: namespace.update(names))


def _owner_of_forward(base: Any) -> Any:
    """What has the forward of `base` as a function of the module: `base`, unless it is of another kind there.

    Only the instances of scripted modules know theirs; a static method, a property or an object is no function of the module.
    """
    static = inspect.getattr_static(base, "forward", None)
    bind = getattr(type(static), "__get__", None)
    if callable(static) and bind is not None and bind(static, None, base) is static:
        return base

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if static is None:
            return self.__getattr__("forward")(*args, **kwargs)
        return (static if bind is None else bind(static, self, base))(*args, **kwargs)

    shown: Any = getattr(base, "forward", None)
    if isinstance(static, functools.partialmethod):
        functools.update_wrapper(forward, shown)
    elif callable(shown):
        _look_like(forward, shown)
    return types.SimpleNamespace(forward=forward)


def _make_forward(owner: Any) -> Any:
    """The forward of a hooked class; it looks `owner.forward` up on each call, so that patches of the class still work."""

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            hook = self._hf_hook
        except AttributeError:  # removed by hand
            return owner.forward(self, *args, **kwargs)
        device = hook._device_to_check
        if device is None:
            if hook._idle:
                return owner.forward(self, *args, **kwargs)
            return hook._run(self, owner.forward, args, kwargs)
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # most layers: in the shortest way
            (value,) = args
            if value.device != device:
                return hook._run(self, owner.forward, args, kwargs)
            output = owner.forward(self, value)
        elif are_on(args, kwargs, device) and (
            not hook._returns_output or (args and type(args[0]) is Tensor)  # which tells where the input is
        ):
            output = owner.forward(self, *args, **kwargs)
        else:
            return hook._run(self, owner.forward, args, kwargs)
        if hook._returns_output:
            return bring_back(output, device, hook.skip_keys)
        return output

    # torch.compile keeps its cache, and counts recompilations, per code object: one for each class
    forward.__code__ = forward.__code__.replace()
    return forward


def _make_own_forward() -> Any:
    """The forward of a hooked module which had a forward in its instance dictionary."""

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        hook = self.__dict__.get(HOOK)
        if hook is None:
            return self.__dict__[OWN_FORWARD](*args, **kwargs)
        return hook._run(self, _call_own_forward, args, kwargs)

    forward.__code__ = forward.__code__.replace()
    return forward


def _call_own_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return module._acc_own_forward(*args, **kwargs)


def _look_like(wrapper: Any, own_forward: Callable[..., Any]) -> Any:
    """Name, documentation and signature of a forward that is bound already, without a reference to it."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        value = getattr(own_forward, name, None)
        if value is not None:
            setattr(wrapper, name, value)
    try:
        shown = inspect.signature(own_forward)
    except (TypeError, ValueError):  # written in C
        return wrapper
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    wrapper.__signature__ = shown.replace(parameters=[this, *shown.parameters.values()])
    return wrapper
