"""Computing with placeholders: the operation gets the real tensors, and the weights map gets what it wrote to them.

[Note: what an operation returns]
    a result of its own     as it is
    what it wrote to        the placeholder (`weight.add_(1)`, `out=weight`), as torch returns the very same tensor
    a view of a weight      a placeholder with a recipe, which makes the view again from the real tensor where it is used:
                            so writing to `weight[0]` is noticed like writing to the weight
    a weight on the move    the real tensor (`weight.to("cpu")`, `weight.cpu()`)

A real tensor is kept until the outermost hooked forward of the thread ends, so that several uses read the weights map once;
all of them together are at most `_KEPT` times as large as the largest of them, so that a forward which looks at every weight
does not hold the model, and none where memory is short. Where no hooked forward runs it is kept for the operation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from acc_hooks.inputs import at_end_of_forward
from acc_hooks.origin import Loan, Origin, Recipe, RefuseGradient, origin_of, refuse_orphan
from acc_hooks.together import call_all

MakeView = Callable[[Tensor, Recipe], Tensor]

_KEPT = 2  # a layer and the one after it, as prefetch.py


class _Conversion:
    """Of a module, to another dtype or device."""


class _Thread(threading.local):
    """What this thread has borrowed."""

    def __init__(self) -> None:
        # id of a placeholder -> it and its loan, least recently used first
        self.kept: OrderedDict[int, tuple[Tensor, Loan]] = OrderedDict()
        self.conversion: Callable[[], _Conversion | None] = lambda: None  # the one that is going on


_thread = _Thread()


def compute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], make_view: MakeView | None
) -> Any:
    """`func(*args, **kwargs)` with the real tensors behind the placeholders; see the note for what it returns.

    Without `make_view` everything is returned as it is. Raises OffloadedWeightError where something was written to a
    weight whose map is read-only.
    """
    with _borrowing() as borrowed:
        result = func(*borrowed.real(args), **borrowed.real(dict(kwargs)))
    if make_view is None:
        return result
    return borrowed.without_views(result, Recipe(func=func, args=args, kwargs=kwargs), make_view)


def real_value(placeholder: Tensor) -> Tensor:
    """The real tensor behind a placeholder, on the device that the weight's module runs on."""
    with _borrowing() as borrowed:
        return borrowed.real(placeholder)


def address(placeholder: Tensor) -> int:
    """Where the real tensor is, for kernels that are called with addresses; 0 where no hooked forward keeps it there."""
    if not _keeps():
        return 0
    with _borrowing() as borrowed:
        real: Tensor = borrowed.real(placeholder)
        return real.data_ptr()


def drop_kept() -> bool:
    """Memory is short: let go of what is kept for later; whether that was anything."""
    had_some = bool(_thread.kept)
    _drop_kept()
    return had_some


def forget(placeholder: Tensor) -> None:
    """Its value is another one from now on: do not keep the old one, and let everybody see that it was written to."""
    torch.autograd.graph.increment_version(placeholder)
    kept = _thread.kept.pop(id(placeholder), None)
    if kept is not None:
        kept[1].end()


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """Around the conversion of a module: what would take its offloaded weights out of their map is refused."""
    conversion = _Conversion()  # is freed with this frame, so that an interrupt anywhere ends it
    before, _thread.conversion = _thread.conversion, weakref.ref(conversion)
    try:
        yield
    finally:
        _thread.conversion = before


def is_converting() -> bool:
    """Whether this thread is inside `converting`."""
    return _thread.conversion() is not None


@contextlib.contextmanager
def _borrowing() -> Iterator[_Borrowed]:
    borrowed = _Borrowed()
    try:
        yield borrowed
    finally:
        borrowed.give_back()


class _Borrowed:
    """The real tensors of one operation."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[Tensor, Tensor]] = {}  # id of a placeholder -> it and the real tensor
        self._loans: dict[int, Loan] = {}  # id of a module's placeholder -> its loan

    def real(self, value: Any) -> Any:
        """`value` with real tensors for placeholders, in nested containers too; the same object where there are none."""
        origin = origin_of(value)
        if origin is not None:
            known = self._real.get(id(value))
            if known is None:
                known = self._real[id(value)] = (value, self._make(value, origin))
            return known[1]
        if isinstance(value, dict):
            items = {key: self.real(item) for key, item in value.items()}
            return items if any(items[key] is not item for key, item in value.items()) else value
        if isinstance(value, slice):
            bounds = (value.start, value.stop, value.step)
            new = self.real(bounds)
            return value if new is bounds else slice(*new)
        if not isinstance(value, (list, tuple)):
            return value
        found = [self.real(item) for item in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)

    def give_back(self) -> None:
        """The operation is over: changes go home, what need not be kept is dropped."""
        call_all([functools.partial(_give_back, key, loan) for key, loan in self._loans.items()])

    def without_views(self, result: Any, recipe: Recipe, make_view: MakeView) -> Any:
        """`result` with placeholders for the weights and for views of them."""
        if isinstance(result, Tensor):
            for (
                placeholder,
                real,
            ) in self._real.values():  # all of them first: a view that was written to is no new one
                if result is real:
                    return placeholder
            if any(_is_view(result, real) for _, real in self._real.values()):
                return make_view(result, recipe)
        elif type(result) in (tuple, list):
            new = [
                self.without_views(item, _at(recipe, index), make_view) for index, item in enumerate(result)
            ]
            if any(item is not old for item, old in zip(new, result, strict=True)):
                return type(result)(new)
        return result

    def _make(self, placeholder: Tensor, origin: Origin) -> Tensor:
        recipe = origin.recipe
        if recipe is None:
            real = self._borrow(placeholder, origin).tensor
        else:
            real = recipe.func(*self.real(recipe.args), **self.real(dict(recipe.kwargs)))
            for index in recipe.path:
                real = real[index]
        wants = placeholder.requires_grad
        if real.requires_grad is wants or not (real.requires_grad or torch.is_grad_enabled()):
            return real
        real = real.detach()
        if wants:
            real.requires_grad_().register_hook(RefuseGradient(origin.name))
        return real

    def _borrow(self, placeholder: Tensor, origin: Origin) -> Loan:
        key = id(placeholder)
        kept = _thread.kept.get(key)
        if kept is not None:
            _thread.kept.move_to_end(key)
            loan = self._loans[key] = kept[1]
            return loan
        for source in origin.living_sources():
            with _outside_transforms():
                found = source._lend(placeholder)
            if found is not None:
                self._loans[key] = found
                if found.can_be_kept:
                    _keep(placeholder, found)
                return found
        if origin.settled is not None:
            with _outside_transforms():
                tensor = origin.settled()
            if not tensor.is_meta:
                return Loan(tensor=tensor, settle=_nothing, end=_nothing, can_be_kept=False)
        raise refuse_orphan(origin.name)


def _nothing() -> None:
    """A tensor that stays needs no care of ours."""


def _give_back(key: int, loan: Loan) -> None:
    try:
        loan.settle()
    except BaseException:  # the change has no home: nobody may find it in what is kept
        _thread.kept.pop(key, None)
        loan.end()
        raise
    if key not in _thread.kept:
        loan.end()


def _keeps() -> bool:
    """Whether a hooked forward runs in this thread, at whose end everything is dropped."""
    return bool(_thread.kept) or at_end_of_forward(_drop_kept)


def _outside_transforms() -> AbstractContextManager[Any]:
    """What is made in the middle of `torch.func.grad` or `vmap` would belong to that transform, and is kept longer."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def _keep(placeholder: Tensor, loan: Loan) -> None:
    """Until the outermost forward ends, or until there is too much; not at all outside of a forward."""
    kept = _thread.kept
    if not _keeps():
        return
    kept[id(placeholder)] = (placeholder, loan)
    sizes = [other.tensor.nbytes for _, other in kept.values()]
    while len(kept) > 1 and sum(sizes) > _KEPT * max(sizes):
        _, (_, oldest) = kept.popitem(last=False)
        oldest.end()
        sizes.pop(0)


def _drop_kept() -> None:
    kept, _thread.kept = _thread.kept, OrderedDict()
    for _, loan in kept.values():
        loan.end()


def _is_view(result: Tensor, real: Tensor) -> bool:
    return result._is_view() and result._base is (real._base if real._is_view() else real)


def _at(recipe: Recipe, index: int) -> Recipe:
    return Recipe(func=recipe.func, args=recipe.args, kwargs=recipe.kwargs, path=(*recipe.path, index))
