"""What a model makes while it is built empty: no memory until somebody wants the values, and none ever for parameters.

[Note: deferred tensors]
A factory (`torch.zeros(3)`) cannot know whether its result becomes a parameter, which stays empty, or a buffer, which needs
its values. So it returns a tensor on meta, and a recipe is kept: the call, and the fills that followed (`.normal_()`).
* wrapped in a parameter and registered: the recipe is forgotten; the parameter is empty.
* registered as a buffer, computed with, looked into, or still held by somebody at the end: the recipe is carried out, and
  the same Python object has the values from then on.
Arithmetic with a number (`torch.randn(3) * 0.02`) has a recipe of its own, which starts from that of its operand; a family
is carried out together, so that no random number is drawn twice. All of it happens in one thread's function mode.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
unrouted = (
    torch._C.DisableTorchFunction
)  # looking at a tensor inside costs a fifth of what it does through a mode


class Deferral(TorchFunctionMode):
    """Defers what is made in this thread, while it is entered.

    With `everything`, what is made without a device stays on meta for good (enter torch.device("meta") around it).
    """

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self._everything = everything
        self.is_paused = False  # make nothing more: another context is open within this one
        self._passing = False  # do nothing: the call is our own
        self._waiting: dict[int, _Deferred] = {}  # by the id of the tensor
        self._last: _Deferred | None = None
        self._claimed: list[torch.Tensor] = []  # registered; their memory is nobody's any more
        self._by_memory: dict[int, _Deferred] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _KINDS.get(func, _OTHER)
        if kind is not _LOOK and not self._passing:
            if kind is _MAKE and not self.is_paused:
                return self._make(func, args, kwargs or {})
            if kind is _FILL:
                return self._fill(func, args, kwargs or {})
            if self._waiting:
                return self._other(func, args, kwargs or {}, kind)
        return func(*args) if kwargs is None else func(*args, **kwargs)

    def claim(self, parameter: torch.Tensor) -> None:
        """A tensor on meta was registered: its values will not be asked for. Torch functions are unrouted here."""
        last = self._last
        if last is not None and _is_held_here_only(last) and _memory(parameter) == _memory(last.tensor):
            self._forget(last)
        elif self._waiting:
            self._claimed.append(parameter)

    def give_values(self, tensor: torch.Tensor) -> None:
        """Carry out the recipe of a tensor that is deferred; nothing for any other."""
        with self._own_calls():
            deferred = self._deferred(tensor) if self._waiting else None
            if deferred is not None:
                self._carry_out(deferred, tensor)

    def finish(self) -> None:
        """Give values to every deferred tensor that somebody still holds, unless a parameter shares its memory."""
        with self._own_calls():
            self._settle_claims()
            for number, deferred in list(self._waiting.items()):
                is_waiting = number in self._waiting and not deferred.is_claimed
                if is_waiting and not _is_held_here_only(deferred):
                    self._carry_out(deferred, deferred.tensor)

    @contextmanager
    def _own_calls(self) -> Iterator[None]:
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        size = _SIZED.get(func)
        made = None if size is None else size(args, kwargs)
        if made is None or (device is not None and torch.device(device).type == "meta"):
            return self._other(func, args, kwargs)
        if device is None and self._everything:
            return made
        return self._wait(_Deferred(made, func, args, kwargs))

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        others = [*args[1:], *kwargs.values()] if args else [kwargs[key] for key in kwargs if key != "tensor"]
        if not isinstance(tensor, torch.Tensor) or any(isinstance(other, torch.Tensor) for other in others):
            return self._other(func, args, kwargs)
        with unrouted():
            is_meta = tensor.is_meta
        if not is_meta:
            return func(*args, **kwargs)
        deferred = self._deferred(tensor) if self._waiting else None
        if deferred is None:
            return tensor  # a parameter: there is nothing to fill
        if deferred.children:
            return self._other(func, args, kwargs)  # these have its values from before
        deferred.steps += ((func, args[1:], kwargs),)
        return tensor

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: object = None) -> Any:
        if kind is _ARITHMETIC and not kwargs:
            result = self._derive(func, args)
            if result is not None:
                return result
        if self._waiting:
            for tensor in _tensors((*args, *kwargs.values())):
                self.give_values(tensor)
        return func(*args, **kwargs)

    def _derive(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The deferred result of arithmetic between a deferred tensor and numbers; None for anything else."""
        operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if len(operands) != 1 or not all(arg is operands[0] or isinstance(arg, (int, float)) for arg in args):
            return None
        parent = self._waiting.get(id(operands[0]))
        if parent is None or parent.tensor.requires_grad or not parent.tensor.is_floating_point():
            return None
        made = torch.empty_like(parent.tensor)
        child = _Deferred(made, func, args, {})
        child.parent = parent
        parent.children += (child,)
        return self._wait(child)

    def _wait(self, deferred: _Deferred) -> torch.Tensor:
        self._last = self._waiting[id(deferred.tensor)] = deferred
        return deferred.tensor

    def _deferred(self, tensor: torch.Tensor) -> _Deferred | None:
        """The recipe of a tensor: its own, or that of the tensor which a parameter was made of, unless it is registered."""
        found = self._waiting.get(id(tensor))
        if found is not None:
            return found
        with unrouted():
            if not tensor.is_meta:
                return None
            self._settle_claims()
            found = self._by_memory.get(_memory(tensor))
        return None if found is None or found.is_claimed else found

    def _settle_claims(self) -> None:
        with unrouted():
            for new in itertools.takewhile(lambda one: one.memory is None, reversed(self._waiting.values())):
                new.memory = _memory(new.tensor)
                self._by_memory[new.memory] = new
            for parameter in self._claimed:
                deferred = self._by_memory.get(_memory(parameter))
                if deferred is not None:
                    deferred.is_claimed = True
                    if _is_held_here_only(deferred) and not deferred.children:
                        self._forget(deferred)
            self._claimed.clear()

    def _carry_out(self, deferred: _Deferred, tensor: torch.Tensor) -> None:
        root = deferred
        while root.parent is not None:
            root = root.parent
        with torch.no_grad():
            family = [(root, root.values())]
            for member, values in family:  # grows
                wanted = [one for one in member.children if not (one.is_claimed and _is_held_here_only(one))]
                family += [(one, one.values(member.tensor, values)) for one in wanted]
        for member, values in family:
            self._forget(member)
            _swap(member.tensor, values)
        if tensor is not deferred.tensor:  # a parameter that was made of it
            _swap(tensor, torch.Tensor._make_subclass(type(tensor), deferred.tensor.detach()))

    def _forget(self, deferred: _Deferred) -> None:
        self._waiting.pop(id(deferred.tensor), None)
        if deferred.memory is not None:
            self._by_memory.pop(deferred.memory, None)
        if self._last is deferred:
            self._last = None


class _Deferred:
    """A tensor on meta with its recipe: a call, fills, and what was derived from it."""

    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()
    children: tuple[_Deferred, ...] = ()
    parent: _Deferred | None = None
    memory: int | None = None  # identifies it, once somebody asked
    is_claimed = False  # a registered parameter is made of it

    def __init__(
        self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.tensor, self.func, self.args, self.kwargs = tensor, func, args, kwargs

    def values(self, parent: torch.Tensor | None = None, real: torch.Tensor | None = None) -> torch.Tensor:
        """The real tensor, of the shape and dtype at the time of the call; `real` are the values of `parent`, if it has one."""
        if parent is not None:
            tensor: torch.Tensor = self.func(*(real if arg is parent else arg for arg in self.args))
        else:
            values = self.args[1:] if self.func is torch.full else ()
            kwargs = {name: value for name, value in self.kwargs.items() if name != "size"}
            tensor = self.func(self.tensor.shape, *values, **{**kwargs, "dtype": self.tensor.dtype})
        tensor.requires_grad_(False)
        for func, others, named in self.steps:
            if "tensor" in named:
                func(**{**named, "tensor": tensor})
            else:
                func(tensor, *others, **named)
        return tensor


def _swap(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give `tensor`, the same Python object, the values; attributes and `requires_grad` are kept."""
    values.requires_grad_(tensor.requires_grad)
    values.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, values)


def _is_held_here_only(deferred: _Deferred) -> bool:
    return sys.getrefcount(deferred.tensor) <= 2 + len(deferred.children)  # our record, this call, operands


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _sized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor on meta for `torch.zeros` and those with its arguments; None for unusual ones."""
    if not kwargs.keys() <= _USUAL:
        return None
    if "generator" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    with unrouted():
        return torch.empty(*args, **{**kwargs, "device": _META})


def _full(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if len(args) != 2 or not kwargs.keys() <= _USUAL:
        return None
    size, value = args
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}.get(type(value))
    if dtype is None or not isinstance(value, (bool, int, float)):
        return None
    with unrouted():
        return torch.empty(size, **{**kwargs, "dtype": dtype, "device": _META})


_USUAL = frozenset(["size", "dtype", "device", "requires_grad", "generator"])
_SIZED = {
    **dict.fromkeys([torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn], _sized),
    torch.full: _full,
}

# what is done with a call of each function; the most frequent kind first
_LOOK, _MAKE, _FILL, _ARITHMETIC, _OTHER = "look", "make", "fill", "arithmetic", "other"


def _kinds() -> dict[Any, str]:
    tensor = torch.Tensor
    looks = "dim size numel stride element_size is_floating_point is_complex is_contiguous requires_grad_"
    shown = "grad_fn shape ndim dtype requires_grad is_leaf layout itemsize nbytes"
    # in-place, of the same shape, and changing nothing but values
    fills = "normal_ uniform_ zero_ fill_ erfinv_ clamp_ random_ mul_ div_ add_ sub_"
    initialisers = "normal_ uniform_ constant_ kaiming_uniform_"
    operators = (
        "mul div true_divide add sub __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__ neg"
    )
    return {
        **{getattr(tensor, name): _LOOK for name in looks.split()},
        **{getattr(tensor, name).__get__: _LOOK for name in shown.split()},
        torch._C._set_grad_enabled: _LOOK,
        **dict.fromkeys(_SIZED, _MAKE),
        **{getattr(tensor, name): _FILL for name in fills.split()},
        **{getattr(nn.init, name): _FILL for name in initialisers.split()},
        **{getattr(tensor, name): _ARITHMETIC for name in operators.split()},
        **{getattr(torch, name): _ARITHMETIC for name in ("mul", "div", "true_divide", "add", "sub", "neg")},
    }


_KINDS = _kinds()
