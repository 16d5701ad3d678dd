"""Models without memory: every parameter that this thread registers is created on another device, usually meta."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from acc_ops.devices import canonical_device
from acc_ops.environment import parse_flag_from_env


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models on the meta device inside this context: shapes and dtypes, no values, no memory.

    `include_buffers=None` means the environment's ACCELERATE_INIT_INCLUDE_BUFFERS (default: buffers are real). Only this
    thread is concerned, and everything is as before when the context ends, by an exception too.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create parameters on `device` inside this context, and with `include_buffers` every tensor that is made there.

    A parameter keeps its class, dtype, strides, `requires_grad` and the attributes hung on it; one that is registered
    twice stays one parameter. Only this thread is concerned.
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    target = _Target(device=canonical_device(device), buffers=include_buffers)
    with contextlib.ExitStack() as stack:
        if include_buffers:
            stack.enter_context(target.device)  # a mode of this thread: factory functions use the device
        if target.device.type == "meta":
            stack.enter_context(_SkipFilling())
        stack.enter_context(_hooks.listening())
        _targets.stack.append(target)
        stack.callback(_targets.stack.remove, target)
        yield


@dataclass(frozen=True, kw_only=True, eq=False)
class _Target:
    """One open context: where tensors go, and which parameter became which."""

    device: torch.device
    buffers: bool
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = field(default_factory=dict)

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self.moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        moved = _moved_parameter(parameter, self.device)
        self.moved[id(parameter)] = weakref.ref(parameter), moved
        return moved


class _Targets(threading.local):
    """The open contexts of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Target] = []


class _RegistrationHooks:
    """torch's registration hooks belong to the whole process: they are there while any thread has a context open.

    In threads without one they do nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._handles: list[RemovableHandle] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            if self._open == 1:
                on_parameter: Callable[..., Any] = _on_parameter
                on_buffer: Callable[..., Any] = _on_buffer
                self._handles = [
                    register_module_parameter_registration_hook(on_parameter),
                    register_module_buffer_registration_hook(on_buffer),
                ]
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    for handle in self._handles:
                        handle.remove()


class _SkipFilling(TorchFunctionMode):
    """Filling a tensor that has no values is skipped in this thread.

    On meta it would go through Python decompositions, the first of which imports the compiler: seconds for nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


# in-place, of the same shape, and changing nothing but values
_FILLING = frozenset(
    [
        getattr(torch.Tensor, name)
        for name in ("normal_", "uniform_", "zero_", "fill_", "erfinv_", "clamp_", "random_")
    ]
    + [getattr(nn.init, name) for name in ("normal_", "uniform_", "constant_", "kaiming_uniform_")]
)

_targets = _Targets()
_hooks = _RegistrationHooks()


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG001
    if not _targets.stack or parameter is None or is_lazy(parameter):
        return None  # keep what is registered; a lazy parameter has no memory yet
    target = _targets.stack[-1]
    return None if parameter.device == target.device else target.parameter(parameter)


def _on_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:  # noqa: ARG001
    if not _targets.stack or buffer is None or not _targets.stack[-1].buffers:
        return None
    return None if buffer.device == _targets.stack[-1].device else buffer.to(_targets.stack[-1].device)


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    data = parameter.detach().to(device)
    kind = type(parameter)
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        moved: Any = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        moved = data.as_subclass(kind).requires_grad_(parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)
    result: nn.Parameter = moved
    return result
