"""The user's own module, out of what was put around it.

[Note: what can be around a model] a parallel wrapper (DistributedDataParallel, DataParallel, FSDP, or one an engine registered here) holds it in an
attribute; torch.compile holds it in `_orig_mod`; a precision replaces its `forward` and keeps the old one in `_original_forward`; an
engine may have exchanged layers, and left a marker attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from acc_ops.regions import is_compiled_module

# wrapper class -> the attribute that holds the wrapped module; engines add theirs
_WRAPPERS: dict[type, str] = {nn.DataParallel: "module", nn.parallel.DistributedDataParallel: "module"}
# marker attribute -> what reverts the change it stands for
_FINALIZERS: dict[str, Callable[[nn.Module], None]] = {}


def register_wrapper(cls: type, inner: str = "module") -> None:
    """Let `extract_model_from_parallel` unwrap instances of `cls`, whose attribute `inner` is the wrapped module."""
    _WRAPPERS[cls] = inner


def register_unwrap_finalizer(marker: str, revert: Callable[[nn.Module], None]) -> None:
    """Have `revert(model)` called on models with a true attribute `marker` when they are unwrapped with `keep_fp32_wrapper=False`."""
    _FINALIZERS[marker] = revert


def extract_model_from_parallel(
    model: Any,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:
    """The model out of its parallel wrappers, in whatever order they and torch.compile are nested.

    `keep_torch_compile` puts the compiled shell back around it (the given one where nothing else was around the model). `keep_fp32_wrapper=False`
    restores the forward that a precision replaced and runs the registered finalizers. `recursive` also unwraps submodules, in place.
    """
    shell = None
    while True:
        if is_compiled_module(model):
            shell, model = model, model._orig_mod
        elif (inner := _inner_of(model)) is not None:
            model = inner
        else:
            break
    if recursive and isinstance(model, nn.Module):
        _unwrap_children(model)
    if not keep_fp32_wrapper:
        _restore_forward(model)
        for marker, revert in _FINALIZERS.items():
            if getattr(model, marker, False):
                revert(model)
    if keep_torch_compile:
        if shell is not None:
            # a new shell: the old one belongs to the wrapped model, which stays usable
            return shell if shell._orig_mod is model else type(shell)(model, shell.dynamo_ctx)
        return model
    return vars(model).get("_orig_mod", model) if isinstance(model, nn.Module) else model


def _inner_of(model: Any) -> Any:
    """What a parallel wrapper holds, None for any other object."""
    for cls in type(model).__mro__:
        if cls in _WRAPPERS:
            return getattr(model, _WRAPPERS[cls])
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without that module there can be none
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        return model.module
    return None


def _unwrap_children(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            inner = child
            while (deeper := _inner_of(inner)) is not None:
                inner = deeper
            if inner is not child:
                parent._modules[name] = inner
                _unwrap_children(inner)


def _restore_forward(model: Any) -> None:
    """Put the forward back that was there before a precision wrapped it. It is bound already: binding it again would break it."""
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        vars(model).pop("forward", None)
    else:
        model.forward = original
