"""What a model makes while it is built empty: no memory until somebody wants the values, and none ever for parameters.

[Note: deferred tensors]
A factory (`torch.zeros(3)`) cannot know whether its result becomes a parameter, which stays empty, or a buffer, which needs
its values. What torch's own layers make, and what is large, is therefore deferred: the factory returns a tensor on meta, and
a recipe is kept: the call, and the fills that followed (`.normal_()`).
* wrapped in a parameter and registered: the recipe is forgotten; the parameter is empty.
* registered as a buffer, computed with, looked into, or still held by somebody at the end: the recipe is carried out, and
  the same Python object has the values from then on.
Arithmetic with a number (`torch.randn(3) * 0.02`), a cast and a view have a recipe of their own, which starts from that of
their operand; a family is carried out together, so that no random number is drawn twice. All of it happens in one thread's
function mode, and what does not come through that (another thread, TorchScript, torch.func) sees a deferred tensor as it is.
So a small tensor of anybody else's is made as ever, is right everywhere, and moves when it is registered as a parameter.

[Note: parameters have no values]
Computing with parameters gives tensors without values, on meta too. What is computed with them goes there for the call.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from acc_bigmodel.deferred_calls import (
    ARITHMETIC,
    ASK,
    BY_SHAPE,
    FILL,
    KINDS,
    LOOK,
    MAKE,
    META,
    OTHER,
    RESHAPE,
    SIZED,
    is_made_by_a_layer,
    is_plain,
    unrouted,
    writes,
)

_SMALL_BYTES = 1 << 20  # what is smaller is made at once, unless by one of torch's layers


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
        # memory of what was made at once; a weak reference keeps its number
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = KINDS.get(func, OTHER)
        if kind is not LOOK and not self._passing:
            if kind is MAKE and not self.is_paused:
                return self._make(func, args, kwargs or {})
            if kind is FILL:
                return self._fill(func, args, kwargs or {})
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

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a real tensor was made here."""
        return bool(self._made) and _memory(tensor) in self._made

    def finish(self) -> None:
        """Give values to every deferred tensor that somebody still holds, unless a parameter shares its memory."""
        self._made.clear()
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
        size = None if device is not None and torch.device(device).type == "meta" else SIZED[func]
        made = None if size is None else size(args, kwargs)
        if made is None:
            return self._other(func, args, kwargs)
        if device is None and self._everything:
            return made
        with unrouted():
            is_small = made.numel() * made.element_size() < _SMALL_BYTES
        if not is_small or is_made_by_a_layer(2):
            deferred = _Deferred(made, func, args, kwargs)
            if not is_small:
                with unrouted():
                    deferred.first_memory = _memory(made)
            return self._wait(deferred)
        real = func(*args, **kwargs)
        with unrouted():
            storage = real.untyped_storage()
            self._made[storage._cdata] = StorageWeakRef(storage)
        return real

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
        if deferred.children or deferred.shares_memory():
            return self._other(func, args, kwargs)  # others have its values from before, or its memory
        deferred.steps += ((func, args[1:], kwargs),)
        return tensor

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: object = OTHER) -> Any:
        if self._waiting and (kind is ARITHMETIC or kind is RESHAPE):
            result = self._derive(func, args, kwargs, kind is RESHAPE)
            if result is not None:
                return result
        tensors = list(_tensors((*args, *kwargs.values())))
        with unrouted():
            on_meta = [tensor for tensor in tensors if tensor.is_meta]
        empty = [tensor for tensor in on_meta if not self._waiting or self._deferred(tensor) is None]
        if empty:
            written = [*_tensors([kwargs.get("out")]), *(tensors[:1] if writes(func) or kind is ASK else ())]
            stays_empty = all(any(tensor is one for one in empty) for tensor in written)
            if stays_empty == (kind is ASK):
                raise _no_values(func, tensors[0])
            if len(empty) < len(tensors):
                return self._without_values(func, args, kwargs)
        if self._waiting:
            for tensor in on_meta:
                self.give_values(tensor)
        return func(*args, **kwargs)

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with parameters and with tensors that have values; see the second note."""

        def sent(value: Any, all_of_them: bool) -> Any:
            if type(value) in (list, tuple):
                return type(value)(sent(one, all_of_them) for one in value)
            if not isinstance(value, torch.Tensor) or not (all_of_them or id(value) in self._waiting):
                return value
            if value.is_meta and id(value) not in self._waiting:
                return value
            return _like(value).requires_grad_(value.requires_grad)

        def call(all_of_them: bool) -> Any:
            named = {name: sent(arg, all_of_them) for name, arg in kwargs.items()}
            return func(*sent(args, all_of_them), **named)

        try:
            return call(False)  # torch takes some with values: an index, what is copied
        except (RuntimeError, NotImplementedError):
            return call(True)

    def _derive(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], may_share: bool
    ) -> torch.Tensor | None:
        """The deferred result of computing with one deferred tensor and numbers; None for anything else."""
        operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if len(operands) != 1 or not all(
            arg is operands[0] or is_plain(arg) for arg in (*args, *kwargs.values())
        ):
            return None
        operand = operands[0]
        parent = self._waiting.get(id(operand))
        with unrouted():
            if parent is None or operand.requires_grad or not (may_share or operand.is_floating_point()):
                return None
            if may_share:
                result = func(*args, **kwargs)
                if result is operand:
                    return operand
                made = _like(result)
            elif kwargs or not all(arg is operand or isinstance(arg, (int, float)) for arg in args):
                return None
            else:
                made = torch.empty_like(operand)
        child = _Deferred(made, func, args, kwargs)
        child.parent, child.may_share = parent, may_share
        parent.children += (child,)
        return self._wait(child)

    def _wait(self, deferred: _Deferred) -> torch.Tensor:
        self._last = self._waiting[id(deferred.tensor)] = deferred
        return deferred.tensor

    def _deferred(self, tensor: torch.Tensor) -> _Deferred | None:
        """The recipe of a tensor: its own, or that of the tensor which a parameter was made of, unless it is registered."""
        with unrouted():
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self._refuse_wrapped(tensor)
                return None
            found = self._waiting.get(id(tensor))
            if found is not None:
                found.check_memory()
                return found
            if not tensor.is_meta:
                return None
            self._settle_claims()
            found = self._by_memory.get(_memory(tensor))
        return None if found is None or found.is_claimed else found

    def _refuse_wrapped(self, tensor: torch.Tensor) -> None:
        """What torch.func wraps cannot get values any more."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if id(tensor) in self._waiting:
            raise RuntimeError(
                f"torch.func computes with a tensor of {tensor.nbytes} bytes that was made in this empty context and has "
                "no values yet: make it before, or ask for its values first (`tensor[:1].tolist()`)"
            )

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
        deferred.check_memory()
        root = deferred
        while root.parent is not None:
            root = root.parent
        needing_gradient = []
        family = [root]
        while family:
            member = family.pop()
            self._forget(member)
            if member.tensor.requires_grad:
                needing_gradient.append(member.tensor)
            _swap(member.tensor, member.values())
            wanted = [
                one
                for one in member.children
                if one.steps or not (one.is_claimed and _is_held_here_only(one))
            ]
            family += reversed(wanted)  # in the order of the calls, each with what was made of it
        for one in needing_gradient:
            one.requires_grad_()
        if tensor is not deferred.tensor:  # a parameter that was made of it
            needs_gradient = tensor.requires_grad
            _swap(tensor, torch.Tensor._make_subclass(type(tensor), deferred.tensor.detach()))
            tensor.requires_grad_(needs_gradient)

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
    first_memory: int | None = None  # of a large one, when it was made
    may_share = False  # memory with its parent
    is_claimed = False  # a registered parameter is made of it

    def __init__(
        self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.tensor, self.func, self.args, self.kwargs = tensor, func, args, kwargs

    def check_memory(self) -> None:
        """Raise RuntimeError for a tensor that has become another one without a call that we see."""
        if self.first_memory is not None and _memory(self.tensor) != self.first_memory:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} was made in this empty context and then exchanged (set_, "
                "swap_tensors) before it had values: make it before, or ask for its values first (`tensor[:1].tolist()`)"
            )

    def shares_memory(self) -> bool:
        """Whether a fill may reach tensors other than those that this one was made of, one of the other."""
        one = self
        while one.may_share and one.parent is not None:
            one = one.parent
            if len(one.children) > 1:
                return True
        return False

    def values(self) -> torch.Tensor:
        """The real tensor, of the shape and dtype at the time of the call; what it is made of has its values."""
        tensor: torch.Tensor
        if self.parent is not None:
            tensor = self.func(*self.args, **self.kwargs)
        else:
            values = (self.tensor.shape, *self.args[1:]) if self.func is torch.full else self.args
            if self.func in BY_SHAPE and self.func is not torch.full:
                values = (self.tensor.shape,)
            kwargs = {name: value for name, value in self.kwargs.items() if name != "size"}
            tensor = self.func(*values, **{**kwargs, "dtype": self.tensor.dtype})
            tensor.requires_grad_(False)
        for func, others, named in self.steps:
            if "tensor" in named:
                func(**{**named, "tensor": tensor})
            else:
                func(tensor, *others, **named)
        return tensor


def _swap(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give `tensor`, the same Python object, the values; it keeps its class, attributes and weak references.

    torch.utils.swap_tensors would swap these too, and refuses a tensor that has weak references.
    """
    torch._C._swap_tensor_impl(tensor, values)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on meta of the same shape, strides and dtype, with memory of its own."""
    if tensor.layout is not torch.strided:
        return tensor.to(META)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _no_values(func: Any, tensor: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{getattr(func, '__name__', func)!r} asks for the values of a parameter, or of what was computed from one, while "
        f"the model is built empty (shape {tuple(tensor.shape)}): there are none yet. Build this part in "
        "`with init_on_device('cpu'):`, or give it the value"
    )


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
