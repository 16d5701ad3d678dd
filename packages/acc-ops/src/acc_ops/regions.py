"""Regional compilation: a repeated block is compiled once for all its copies, which starts much sooner than the whole model.

[Note: what is compiled by itself] The items of a `ModuleList` of one class. Where four or more items of a `ModuleList`, `Sequential` or `ModuleDict`
come in equal ones (same class, same sizes as they print), all items of it, each by itself: blocks that alternate, or that stand in a `Sequential`
with others. An item without a forward of its own (a list of lists) is looked into. What is left is compiled in as large pieces as have none of these inside.

[Note: torch's own layers] torch.compile does not look into the frames of torch.nn, so it calls such a layer from a function of its own, the same for
all: after eight layers it gives up, and shapes that differ between two layers make the second graph a dynamic one. Here each kind of layer has
its own function. A layer that is one operation (Linear, Embedding, LayerNorm) stays as it is inside its shell where inductor would call the same kernel: its
graph costs a second or two at the start and a guard at each call.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FEWEST = 4  # equal blocks in a container that are worth more than one graph of the whole container


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
    return _Copy(_Plan(module), compile_kwargs).of(module)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the regions of `module` in place, so that the module that FSDP2 shards stays the same object, and return it."""
    for region in _regions(module, _Plan(module)):
        region.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the regions of `module` in place, as DeepSpeed's engine keeps the module it was given."""
    compile_regions_fsdp2(module, **compile_kwargs)


class _Plan:
    """Which modules of a model are compiled by themselves, found in one walk."""

    def __init__(self, model: nn.Module) -> None:
        self._kinds: dict[nn.Module, int] = {}
        self._numbers: dict[object, int] = {}
        self._rows: set[nn.Module] = set()
        self._inside: dict[nn.Module, bool] = {}
        self._walk(model)

    def is_row(self, module: nn.Module) -> bool:
        """Whether it is a container whose items are compiled one by one, as the first note above says."""
        return module in self._rows

    def is_split(self, module: nn.Module) -> bool:
        """Whether its children are compiled and not the module: it has repeated blocks inside, or no forward of its own (a container)."""
        return self._inside[module] or _only_holds_others(module)

    def kind(self, module: nn.Module) -> int:
        """The same number for modules that one graph serves: of the same classes, with the sizes that they print."""
        if module not in self._kinds:
            parts = tuple(
                (name, None if child is None else self.kind(child))  # an empty container is false
                for name, child in module._modules.items()
            )
            key = type(module), module.extra_repr(), parts
            self._kinds[module] = self._numbers.setdefault(key, len(self._numbers) + 1)
        return self._kinds[module]

    def _walk(self, module: nn.Module) -> bool:
        if module not in self._inside:
            inside = [self._walk(child) for child in module.children()]
            if self._items_are_blocks(module):
                self._rows.add(module)
            self._inside[module] = any(inside) or module in self._rows or _is_list_of_containers(module)
        return self._inside[module]

    def _items_are_blocks(self, module: nn.Module) -> bool:
        if is_repeated_blocks(module):
            return not _only_holds_others(next(module.children()))
        if not isinstance(module, _CONTAINERS) or not _adds_nothing(module):
            return False
        items = [
            item for item in module.children() if not _is_one_operation(item) and not _only_holds_others(item)
        ]
        equal = sum(count for count in Counter(map(self.kind, items)).values() if count > 1)
        return equal >= _FEWEST and 2 * equal >= len(items)


def _is_list_of_containers(module: nn.Module) -> bool:
    """Whether its items are dictionaries, or lists, of the parts of a block."""
    if not is_repeated_blocks(module):
        return False
    first = next(module.children())
    return _only_holds_others(first) and next(first.children(), None) is not None


def _adds_nothing(container: nn.Module) -> bool:
    """Whether nothing is computed but what its items compute."""
    return _only_holds_others(container) or type(container).forward is nn.Sequential.forward


def _only_holds_others(module: nn.Module) -> bool:
    """Whether it has no forward of its own: a list of modules or of parameters, even an empty one."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _is_one_operation(module: nn.Module) -> bool:
    """Whether it is a layer of torch's own that calls one kernel; losses are several that a compiler joins."""
    cls = type(module)
    own = getattr(nn, cls.__name__, None) is cls and "forward" not in vars(module)
    return own and not module._modules and not isinstance(module, nn.modules.loss._Loss)


def _regions(module: nn.Module, plan: _Plan) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if plan.is_row(current):
            yield from (block for block in dict.fromkeys(current.children()) if block not in seen)
            seen.update(current.children())
        elif plan.is_split(current):
            stack.extend(reversed(list(current.children())))
        else:
            yield current


class _Copy:
    """A model rebuilt around compiled regions. One that is used twice is compiled once, and stays shared."""

    def __init__(self, plan: _Plan, compile_kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.compile_kwargs = compile_kwargs
        self.done: dict[nn.Module, nn.Module] = {}
        self.callers: dict[int, FunctionType] = {}
        by_default = compile_kwargs.get("backend", "inductor") == "inductor" and not compile_kwargs.get(
            "options"
        )
        self.leaves_single_operations = by_default and compile_kwargs.get("mode") in (None, "default")

    def of(self, module: nn.Module) -> nn.Module:
        """The compiled form of a module."""
        if module in self.done:
            return self.done[module]
        if not self.plan.is_split(module):
            return self._shell(module)
        copy = module.__class__.__new__(module.__class__)
        vars(copy).update(vars(module))
        self.done[module] = copy
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and value.__self__ is module:
                vars(copy)[name] = MethodType(value.__func__, copy)
        compiled = self._shell if self.plan.is_row(module) else self.of
        vars(copy)["_modules"] = {
            name: None if child is None else compiled(child) for name, child in module._modules.items()
        }
        vars(copy)["_orig_mod"] = module
        return copy

    def _shell(self, module: nn.Module) -> nn.Module:
        if module not in self.done:
            shell: Any = torch.compile(module, **self.compile_kwargs)
            self.done[module] = shell
            if is_compiled_module(shell) and not self.compile_kwargs.get("disable"):
                self._call_torchs_own(module, shell)
        return self.done[module]

    def _call_torchs_own(self, module: nn.Module, shell: Any) -> None:
        """What the shell of one of torch's own layers calls: see the second note above."""
        if self.leaves_single_operations and _is_one_operation(module):
            shell.forward = module.__call__
        elif type(module).forward.__module__.startswith("torch."):
            kind = self.plan.kind(module)
            if kind not in self.callers:
                self.callers[kind] = _new_caller(len(self.callers))
            shell.forward = shell.dynamo_ctx(MethodType(self.callers[kind], module))


def _new_caller(number: int) -> FunctionType:
    """A function that calls its first argument with the others; torch.compile keeps graphs by the code, and sizes by the code's name."""

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{number}")
    assert isinstance(call, FunctionType)
    return call
