"""A whole model waits on the CPU and comes to its device when it is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from acc_hooks.hook import ModelHook, remove_hook_from_module
from acc_hooks.inputs import are_on, move
from acc_hooks.ties import every_tensor
from acc_ops.devices import DeviceLike, canonical_device
from acc_ops.world import current_world


class CpuOffload(ModelHook):
    """Attaching moves the model to the CPU; a call first sends `prev_module_hook`'s model there, then this one to its device.

    Afterwards the model stays on `execution_device` (default: this process's device) until its UserCpuOffloadHook, or the
    model behind it in the chain, sends it back. Arguments go to the device on every call.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = execution_device if execution_device is not None else current_world().device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        previous = self.prev_module_hook
        if previous is not None and not _is_on(previous.model, torch.device("cpu")):
            previous.offload()
        device = canonical_device(self.execution_device)
        if not _is_on(module, device):
            module.to(device)
        if are_on(args, kwargs, device):
            return args, kwargs
        return move(args, device), move(kwargs, device)


class UserCpuOffloadHook:
    """What the user of a CpuOffload holds: `offload()` sends the model to the CPU, `remove()` removes the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU until it is called again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def _is_on(module: nn.Module, device: torch.device) -> bool:
    return all(tensor.device == device for _, tensor in every_tensor(module))
