"""A visit to a module's own weights: while it lasts they are real, on the device that was asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from acc_hooks.align import AlignDevicesHook
from acc_hooks.borrowing import real_value
from acc_hooks.calling import Use
from acc_hooks.homes import differs
from acc_hooks.hook import attached_hook, iterate_hooks
from acc_hooks.placeholder import copy_flag, is_placeholder
from acc_hooks.tensors import place, put_tensor
from acc_hooks.ties import every_tensor
from acc_hooks.together import call_all
from acc_ops.devices import DeviceLike, canonical_device


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's hook, or one in its chain, is an AlignDevicesHook that offloads."""
    return any(True for _ in _offloading_hooks(module))


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """Inside it the module's own weights are real: read from their map if they are offloaded, on `execution_device` if given.

    Also where the hook of a module above offloads them. Not for submodules. What is changed inside, in place or by assignment, is kept. Raises OffloadedWeightError where
    that cannot be: the weights come from a read-only map.
    """
    device = None if execution_device is None else canonical_device(execution_device)
    hooks = list(_offloading_hooks(module))
    if hooks:
        uses = [Use() for _ in hooks]
        try:
            for hook, use in zip(hooks, uses, strict=True):
                hook._hold_for(use, module, device, compare=True)
            yield
        finally:
            call_all([use.end for use in uses])
    else:
        yield from _moved(module, device)


def _offloading_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    for hook in iterate_hooks(attached_hook(module)):
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            yield hook


def _moved(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """The module's own tensors on `device` meanwhile; the very same objects, with what was written, afterwards.

    Placeholders, whose weights the hook of a module above offloads, get their values; without a device only they do.
    """
    away = {
        name: (tensor, _real_on(tensor, device, name))
        for name, tensor in every_tensor(module, recurse=False)
        if device is not None or is_placeholder(tensor)
    }
    for name, (_, moved) in away.items():
        put_tensor(module, name, moved)
    try:
        yield
    finally:
        now = dict(every_tensor(module, recurse=False))
        call_all(
            [
                functools.partial(_bring_back, module, name, tensor, moved, now[name])
                for name, (tensor, moved) in away.items()
                if name in now and moved is not tensor  # else deleted by the user, or never moved
            ]
        )


def _real_on(tensor: Tensor, device: torch.device | None, name: str) -> Tensor:
    if is_placeholder(tensor):
        value = real_value(tensor).detach().clone()  # the map's own memory would show no change
        return place(tensor, value, value.device if device is None else device, name=name)
    assert device is not None
    return place(tensor, None, device, name=name)


def _bring_back(module: nn.Module, name: str, tensor: Tensor, moved: Tensor, current: Tensor) -> None:
    """`moved` was put in the place of `tensor`, and `current` is there now."""
    if is_placeholder(tensor):
        put_tensor(module, name, tensor)
        if moved.is_meta or current.is_meta:
            return
        copy_flag(tensor, current.requires_grad)
        if current is not moved:
            tensor.data = current.detach()
        elif differs(moved, real_value(tensor)):
            with torch.no_grad():
                tensor.copy_(moved)
    elif current is not moved:  # assigned by the user
        put_tensor(module, name, place(current, None, tensor.device, name=name))
    else:
        if not tensor.is_meta and not moved.is_meta and differs(moved, tensor):
            with torch.no_grad():
                tensor.copy_(moved)
        put_tensor(module, name, tensor)
