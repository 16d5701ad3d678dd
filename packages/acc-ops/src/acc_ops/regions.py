"""Regional compilation: a repeated block is compiled once for all its copies, which starts much sooner than the whole model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn


def is_compiled_module(module: Any) -> bool:
    """Whether it is the shell that torch.compile put around a module."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without that module there can be none
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether any submodule is a compiled shell."""
    return any(is_compiled_module(submodule) for submodule in module.modules() if submodule is not module)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether it is a ModuleList, not empty, of which all items have the first one's class."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(type(block) is type(module[0]) for block in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether it or any submodule is a list of repeated blocks."""
    return any(is_repeated_blocks(submodule) for submodule in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A model that shares the parameters of `module`, with each repeated block compiled by itself and the rest in as large pieces as possible.

    The given module is not changed, and is kept as `_orig_mod`. A model without repeated blocks is compiled whole. The keyword arguments are
    torch.compile's.
    """
    return _compiled(module, _with_repeated_blocks(module), compile_kwargs, {})


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the regions of `module` in place, so that the module that FSDP2 shards stays the same object, and return it."""
    for region in _regions(module, _with_repeated_blocks(module)):
        region.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the regions of `module` in place, as DeepSpeed's engine keeps the module it was given."""
    compile_regions_fsdp2(module, **compile_kwargs)


def _with_repeated_blocks(module: nn.Module) -> set[nn.Module]:
    """The modules that must not be compiled whole: those with repeated blocks inside, found in one walk."""
    found: dict[nn.Module, bool] = {}

    def walk(current: nn.Module) -> bool:
        if current not in found:
            inside = [walk(child) for child in current.children()]
            found[current] = any(inside) or is_repeated_blocks(current)
        return found[current]

    walk(module)
    return {current for current, inside in found.items() if inside}


def _is_split(module: nn.Module, inside: set[nn.Module]) -> bool:
    """Whether the children are compiled and not the module: it has repeated blocks inside, or no forward of its own (a container)."""
    no_forward = type(module).forward is nn.Module.forward
    return module in inside or (no_forward and next(module.children(), None) is not None)


def _regions(module: nn.Module, inside: set[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_repeated_blocks(current):
            yield from (block for block in dict.fromkeys(current.children()) if block not in seen)
            seen.update(current.children())
        elif _is_split(current, inside):
            stack.extend(reversed(list(current.children())))
        else:
            yield current


def _compiled(
    module: nn.Module,
    inside: set[nn.Module],
    compile_kwargs: dict[str, Any],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """The compiled form of a module; one that is used twice is compiled once, and stays shared."""
    if module in done:
        return done[module]
    if not _is_split(module, inside):
        return _shell(module, compile_kwargs, done)
    copy = module.__class__.__new__(module.__class__)
    vars(copy).update(vars(module))
    done[module] = copy
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(copy)[name] = MethodType(value.__func__, copy)
    blocks = is_repeated_blocks(module)
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if child is None:
            children[name] = None
        elif blocks:
            children[name] = _shell(child, compile_kwargs, done)
        else:
            children[name] = _compiled(child, inside, compile_kwargs, done)
    vars(copy)["_modules"] = children
    vars(copy)["_orig_mod"] = module
    return copy


def _shell(module: nn.Module, compile_kwargs: dict[str, Any], done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in done:
        shell: Any = torch.compile(module, **compile_kwargs)
        done[module] = shell
    return done[module]
