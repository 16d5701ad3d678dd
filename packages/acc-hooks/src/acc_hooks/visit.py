"""A visit to a module's own weights: while it lasts they are real, on the device that was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from acc_hooks.align import AlignDevicesHook
from acc_hooks.homes import differs
from acc_hooks.hook import attached_hook, iterate_hooks
from acc_hooks.tensors import place, put_tensor
from acc_hooks.ties import every_tensor
from acc_ops.devices import DeviceLike, canonical_device


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's hook, or one in its chain, is an AlignDevicesHook that offloads."""
    return any(True for _ in _offloading_hooks(module))


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """Inside it the module's own weights are real: read from their map if they are offloaded, on `execution_device` if given.

    Not for submodules. What is changed inside, in place or by assignment, is kept. Raises OffloadedWeightError where
    that cannot be: the weights come from a read-only map.
    """
    device = None if execution_device is None else canonical_device(execution_device)
    hooks = list(_offloading_hooks(module))
    if hooks:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                hook._hold(module, counted=True, device=device)
                stack.callback(hook._let_go, module, counted=True, compare=True)
            yield
    elif device is not None:
        yield from _moved(module, device)
    else:
        yield


def _offloading_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    for hook in iterate_hooks(attached_hook(module)):
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            yield hook


def _moved(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The module's own tensors on `device` meanwhile; the very same objects, with what was written, afterwards."""
    away = {
        name: (tensor, place(tensor, None, device, name=name))
        for name, tensor in every_tensor(module, recurse=False)
    }
    for name, (_, moved) in away.items():
        put_tensor(module, name, moved)
    try:
        yield
    finally:
        now = dict(every_tensor(module, recurse=False))
        for name, (tensor, moved) in away.items():
            current = now.get(name)
            if current is None or moved is tensor:
                continue  # deleted by the user, or never moved
            if current is not moved:  # assigned by the user
                put_tensor(module, name, place(current, None, tensor.device, name=name))
                continue
            if tensor.device.type != "meta" and device.type != "meta" and differs(moved, tensor):
                with torch.no_grad():
                    tensor.copy_(moved)
            put_tensor(module, name, tensor)
