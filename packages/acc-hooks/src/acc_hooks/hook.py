"""A hook says what happens around a module's forward, and undoes itself.

[Note: the life of a hook]

    add_hook_to_module(m, hook) ──> init_hook(m)
    m(x) ──> pre_forward(m, x) ──> forward ──> post_forward(m, output) ──> output
                  └── an exception anywhere: _abort, the module is as before the call
    remove_hook_from_module(m) ──> detach_hook(m)

The four public methods are what subclasses override and other libraries call by hand. One call runs through the private
`_run`, which a hook's `_enter` / `_leave` / `_abort` make safe: `_enter` leaves nothing behind when it raises, `_leave`
neither, and `_abort` answers an exception in between. What belongs to one call is in the token `_enter` returns, never
on the hook, so that threads do not meet there.

`_idle`, `_device_to_check` and `_returns_output` are the plan that the wrapped forward reads first; `_replan` renews it
whenever an attribute it depends on is set. Nothing else about a hook is read on the fast path, so torch.compile guards on
little. Making a plan does not touch `__dict__` or `vars()`: CPython would give the hook a dictionary, and a cold one costs
as much as everything else that the fast path does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from acc_hooks import hooked
from acc_hooks.elsewhere import bring_home
from acc_hooks.inputs import are_on
from acc_hooks.together import call_all
from acc_ops.devices import known_kinds

_CALLS = ("pre_forward", "post_forward")

# what a module that is hooked now had in its instance dictionary of methods that move it
_own_moves = WeakIdKeyDictionary()


class Ties(Protocol):
    """What a hook knows of the ties of its model."""

    def rejoin(self, module: nn.Module) -> None:
        """The hooks are gone: the names of a tie share one tensor again."""


class ModelHook:
    """What happens around one module's forward: 1 `init_hook` 2 `pre_forward` 3 `post_forward` 4 `detach_hook`.

    2 and 3 are called for every forward, with `no_grad = True` the forward between them runs under `torch.no_grad()`.
    A subclass overrides what it needs and needs not call `super().__init__()`.
    """

    no_grad: bool = False

    _idle: bool = True  # a call has nothing to do
    _device_to_check: torch.device | None = None  # a call has nothing to do if its arguments are there
    _returns_output: bool = False  # it has: the output must end where the arguments were
    _is_overridden: bool = (
        False  # somebody's pre_forward or post_forward, not those `_enter` and `_leave` stand for
    )
    _calls: ClassVar[tuple[Any, Any]]
    _planned_by: ClassVar[frozenset[str]] = frozenset({"no_grad", *_CALLS})

    def __init_subclass__(cls, own_calls: bool = False, **kwargs: Any) -> None:
        """`own_calls`: the class's `_enter` and `_leave` do what its pre_forward and post_forward do."""
        super().__init_subclass__(**kwargs)
        calls = (cls.pre_forward, cls.post_forward)
        if own_calls:
            cls._calls = calls
        cls._is_overridden = calls != cls._calls
        cls._idle = calls == ModelHook._calls and not cls.no_grad

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._planned_by:
            if name in _CALLS:
                object.__setattr__(self, "_is_overridden", True)
            self._replan()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; returns the module."""
        return module

    def pre_forward(
        self,
        module: nn.Module,  # noqa: ARG002
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward with its arguments; returns those to use, as (args, kwargs)."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """Called after the forward with its output; returns the output to use."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module."""
        return module

    def _replan(self) -> None:
        """An attribute that the plan depends on was set."""
        is_plain = self._calls == ModelHook._calls and not self._is_overridden
        object.__setattr__(self, "_idle", is_plain and not self.no_grad)

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs, token = self._enter(module, args, kwargs)
        try:
            if self._wants_no_grad():
                with torch.no_grad():
                    output = forward(module, *args, **kwargs)
            else:
                output = forward(module, *args, **kwargs)
        except BaseException:
            self._abort(module, token)
            raise
        return self._leave(module, output, token)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        args, kwargs = self._call_pre_forward(module, args, kwargs)
        return args, kwargs, None

    def _call_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        result: Any = self.pre_forward(module, *args, **kwargs)
        if (
            type(result) is tuple
            and len(result) == 2
            and type(result[0]) is tuple
            and type(result[1]) is dict
        ):
            return result
        if isinstance(result, (tuple, list)) and len(result) == 2:
            args, kwargs = result
            if isinstance(args, Iterable) and not isinstance(args, Tensor) and isinstance(kwargs, Mapping):
                return args, kwargs
        raise TypeError(
            f"{type(self).__name__}.pre_forward must return the arguments of the forward as a tuple and a dict, and "
            f"returned {_described(result)}: end it with `return args, kwargs`"
        )

    def _leave(self, module: nn.Module, output: Any, token: Any) -> Any:  # noqa: ARG002
        return self.post_forward(module, output)

    def _abort(self, module: nn.Module, token: Any) -> None:
        """The forward raised: put the module back as it was before the call."""

    def _wants_no_grad(self) -> bool:
        return self.no_grad

    def _known_ties(self) -> Ties | None:
        """The ties of the model that this hook was attached to with others."""

    def _holds_weights(self) -> bool:
        """Whether the module's weights are there only while it runs."""
        return False

    def _is_around_call(self) -> bool:
        """Whether the module's whole call is in `_around_call` if it has forward hooks of torch."""
        return self._holds_weights()

    def _around_call(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """What is around the module's whole call, its forward hooks included, if it has such hooks."""
        return contextlib.nullcontext()

    def _held_placeholders(self) -> dict[int, Tensor]:
        """What a copy of the module made now gets instead of the weights that are there for a call: id -> placeholder."""
        return {}

    def _fill_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Put real values into a state dict where the module holds placeholders."""

    def _loading_state_dict(
        self,
        module: nn.Module,  # noqa: ARG002
        state_dict: Mapping[str, Any],  # noqa: ARG002
        prefix: str,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """What is around the loading of the module's own entries."""
        return contextlib.nullcontext()


ModelHook._calls = (ModelHook.pre_forward, ModelHook.post_forward)


class SequentialHook(ModelHook, own_calls=True):
    """Several hooks as one; every event runs through `hooks` (a tuple) in their order, also `post_forward` and `detach_hook`.

    The forward runs without gradients if any of them says `no_grad`; an exception is answered by each that had begun.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook._call_pre_forward(module, args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        checked = None  # where all the arguments are known to be
        for hook in self.hooks:
            device = hook._device_to_check
            if device is None:
                if not hook._idle:
                    break
            elif hook._returns_output:
                break
            elif device is not checked and device != checked:
                if not are_on(args, kwargs, device):
                    break
                checked = device
        else:
            if not self.no_grad and not self._is_overridden:
                return forward(module, *args, **kwargs)
        return super()._run(module, forward, args, kwargs)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        if self._is_overridden:
            try:
                return super()._enter(module, args, kwargs)
            except BaseException:
                self._abort(module, None)
                raise
        entered: list[tuple[ModelHook, Any]] = []
        try:
            for hook in self.hooks:
                if not hook._idle:
                    args, kwargs, token = hook._enter(module, args, kwargs)
                    entered.append((hook, token))
        except BaseException:
            self._abort(module, entered)
            raise
        return args, kwargs, entered

    def _leave(self, module: nn.Module, output: Any, token: Any) -> Any:
        if token is None:
            try:
                return super()._leave(module, output, token)
            except BaseException:
                self._abort(module, None)
                raise
        left = 0
        try:
            for hook, own_token in token:
                left += 1
                output = hook._leave(module, output, own_token)
        except BaseException:
            self._abort(module, token[left:])
            raise
        return output

    def _abort(self, module: nn.Module, token: Any) -> None:
        if token is None:  # somebody's own pre_forward, which called some of theirs
            token = [(hook, None) for hook in self.hooks]
        call_all([functools.partial(hook._abort, module, own_token) for hook, own_token in token])

    def _wants_no_grad(self) -> bool:
        return self.no_grad or any(hook._wants_no_grad() for hook in self.hooks)

    def _holds_weights(self) -> bool:
        return any(hook._holds_weights() for hook in self.hooks)

    def _is_around_call(self) -> bool:
        return any(hook._is_around_call() for hook in self.hooks)

    @contextlib.contextmanager
    def _around_call(self, module: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook._around_call(module))
            yield

    def _held_placeholders(self) -> dict[int, Tensor]:
        return {key: tensor for hook in self.hooks for key, tensor in hook._held_placeholders().items()}

    def _fill_state_dict(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        for hook in self.hooks:
            hook._fill_state_dict(module, destination, prefix)

    @contextlib.contextmanager
    def _loading_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook._loading_state_dict(module, state_dict, prefix))
            yield


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach `hook` to `module` and return the module; an attached hook is replaced, or kept before it with `append`.

    Appending leaves the attached hook as it is (no detach, no second init): both become a `SequentialHook(old, new)`.
    """
    if not isinstance(hook, ModelHook):
        raise TypeError(
            f"a hook must be a ModelHook, got {type(hook).__name__}; derive your hook's class from ModelHook"
        )
    attached = attached_hook(module)
    if attached is not None and not append:
        module = _same(attached.detach_hook(module), attached, "detach_hook")
        hooked.unwrap(module)
    module = _same(hook.init_hook(module), hook, "init_hook")
    if attached is not None and append:
        hook = SequentialHook(attached, hook)
    elif attached is None:
        _own_moves[module] = [name for name in _moving_methods() if name in module.__dict__]
    hooked.wrap(module, hook)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Detach the hook of `module`, if any, and leave its class and instance dictionary as before; returns the module.

    Methods that move it (`to`, `cuda`, ...) and were put on the instance while it was hooked, or by dispatching, go too.
    `recurse` does the same for every module below; tied names that were on several devices share one tensor again then.
    """
    moving = _moving_methods()
    ties: dict[int, Ties] = {}
    for submodule in list(module.modules()) if recurse else [module]:
        attached = attached_hook(submodule)
        for hook in iterate_hooks(attached) if recurse else ():
            found = hook._known_ties()
            if found is not None:
                ties[id(found)] = found
        if attached is not None:
            attached.detach_hook(submodule)
        hooked.unwrap(submodule)
        kept = moving if attached is None else _own_moves.pop(submodule, ())
        for name in moving:
            move = submodule.__dict__.get(name)
            if callable(move) and (name not in kept or getattr(move, "goes_with_hooks", False)):
                del submodule.__dict__[name]
    bring_home(module)
    for found in ties.values():
        found.rejoin(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of `module` and of every module below it."""
    remove_hook_from_module(module, recurse=True)


def attached_hook(module: nn.Module) -> ModelHook | None:
    """The hook in `module._hf_hook`, if there is one."""
    return module.__dict__.get(hooked.HOOK)


def iterate_hooks(hook: ModelHook | None) -> Iterator[ModelHook]:
    """`hook` and, if it is a chain, everything in it, in order."""
    if isinstance(hook, SequentialHook):
        for inner in hook.hooks:
            yield from iterate_hooks(inner)
    elif hook is not None:
        yield hook


def _moving_methods() -> tuple[str, ...]:
    return ("to", "to_empty", *known_kinds())


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in result)
        return (
            f"a {type(result).__name__} of {len(result)} ({kinds})"
            if kinds
            else f"an empty {type(result).__name__}"
        )
    return "None" if result is None else f"a {type(result).__name__}"


def _same(module: nn.Module, hook: ModelHook, method: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(hook).__name__}.{method} must return the module, and returned {module!r}")
    return module
