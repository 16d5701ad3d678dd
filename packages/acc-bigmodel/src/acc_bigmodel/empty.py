"""Models without memory: every parameter that this thread registers is created on another device, usually meta."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from acc_bigmodel.deferred import Deferral
from acc_bigmodel.deferred_calls import unrouted
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
        stack.enter_context(_hooks.listening())
        stack.enter_context(_open(target))
        if include_buffers:
            stack.enter_context(target.device)  # a mode of this thread: factory functions use the device
        if target.deferral is not None:
            stack.enter_context(target.deferral)
        try:
            yield
        except BaseException:
            target.abandon()
            raise
        target.finish()


class _Target:
    """One open context: where tensors go, and what became of them."""

    def __init__(self, *, device: torch.device, buffers: bool) -> None:
        self.device, self.buffers = device, buffers
        self.deferral = Deferral(everything=buffers) if device.type == "meta" else None
        self.moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self.unfilled: dict[int, nn.Module] = {}  # whose next `reset_parameters` does nothing

    def parameter(self, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        """What to register in place of a parameter; None for itself."""
        with unrouted():
            if parameter.device == self.device:
                if self.deferral is not None:
                    self.deferral.claim(parameter)
                    if not module._parameters and _only_fills(type(module)):
                        self._skip_filling(module)
                return None
            if is_lazy(cast("Any", parameter)):
                return None  # it has no memory yet
            if self.deferral is not None and self.deferral.has_made(parameter):
                torch._C._swap_tensor_impl(parameter, _moved_parameter(parameter, self.device))
                return None
        known = self.moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        _give_values(parameter)
        if parameter.device == self.device:
            return None
        moved = _moved_parameter(parameter, self.device)
        self.moved[id(parameter)] = weakref.ref(parameter), moved
        return moved

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """What to register in place of a buffer; None for itself."""
        if is_lazy(cast("Any", buffer)):
            return None  # it has no memory yet
        if self.buffers and self.deferral is not None:
            with unrouted():
                if buffer.is_meta:
                    self.deferral.claim(buffer)
                    return None
        _give_values(buffer)
        return buffer.to(self.device) if self.buffers and buffer.device != self.device else None

    def finish(self) -> None:
        """What is no parameter has its values, and no module a trace of us."""
        self.abandon()
        if self.deferral is not None:
            self.deferral.finish()

    def abandon(self) -> None:
        """No module has a trace of us. What is deferred is left: it may be too large for this machine."""
        for module in list(self.unfilled.values()):
            cast("Any", module).reset_parameters()

    def _skip_filling(self, module: nn.Module) -> None:
        """Make the next `module.reset_parameters()`, with which its `__init__` ends, do nothing, and then be as it was."""
        number = id(module)
        self.unfilled[number] = module

        def reset_parameters() -> None:
            del self.unfilled.pop(number).__dict__["reset_parameters"]

        module.__dict__["reset_parameters"] = reset_parameters


@contextlib.contextmanager
def _open(target: _Target) -> Iterator[None]:
    """Make `target` the innermost context of this thread."""
    outer = _targets.stack[-1].deferral if _targets.stack else None
    was_paused = outer is not None and outer.is_paused
    if outer is not None:
        outer.is_paused = True
    _targets.stack.append(target)
    try:
        yield
    finally:
        _targets.stack.remove(target)
        if outer is not None:
            outer.is_paused = was_paused


def _give_values(tensor: torch.Tensor) -> None:
    for target in _targets.stack:
        if target.deferral is not None:
            target.deferral.give_values(tensor)


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


# torch's modules whose `reset_parameters` only fills parameters, which is half of the time that it takes to build them
_FILLED: dict[type[nn.Module], Any] = {
    kind: kind.reset_parameters
    for kind in (
        *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
}


def _only_fills(kind: type[nn.Module]) -> bool:
    return (
        kind in _FILLED and getattr(kind, "reset_parameters", None) is _FILLED[kind]
    )  # nobody has put another one there


_targets = _Targets()
_hooks = _RegistrationHooks()


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG001
    stack = _targets.stack
    return stack[-1].parameter(module, parameter) if stack and parameter is not None else None


def _on_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:  # noqa: ARG001
    stack = _targets.stack
    return stack[-1].buffer(buffer) if stack and buffer is not None else None


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
