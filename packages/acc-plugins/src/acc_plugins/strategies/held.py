"""Gradients that micro-batches under `without_sync` have left on each rank: no step takes them for everybody's.

[Note: how a window ends] Most windows end with a backward that synchronises, which exchanges all that its model holds. A loop may be left before
(`break`, an exception), or somebody decides to step now: then the gradients of each rank are its own, and a step with them would train other
weights on every rank (or, where a strategy holds them back, nothing at all). So a step first exchanges what is held. Only under
`without_sync(model, apart=True)`, for ranks that train apart on purpose, does a step take what this rank has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Strategy

Own = Sequence[Tensor | None]  # gradients of one model as they lie on this rank


class SynchronisingStrategy(Strategy):
    """A strategy over several ranks. A subclass says what a model holds on this rank, when it synchronises, and how that is exchanged."""

    synchronises: ClassVar[bool] = True

    def __init__(self, world: World, precision: Precision, *, save_on_each_node: bool = False) -> None:
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        self._windows = Windows()

    def window_of(self, model: nn.Module) -> nn.Module | None:
        """The module of `model` whose gradients are exchanged, as the other calls get it; None for a model without any."""
        raise NotImplementedError

    def own_gradients(self, model: nn.Module) -> Own:
        """The gradients of a model as they lie on this rank, in an order that stays."""
        raise NotImplementedError

    def synchronises_now(self, model: nn.Module) -> bool:
        """Whether a backward exchanges what it finds in this model."""
        raise NotImplementedError

    def exchange_model(self, model: nn.Module) -> None:
        """Average what this model holds over the ranks, to where an optimizer looks for it."""
        raise NotImplementedError

    # 3
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        watched = self._windows.begin_backward(self.synchronises_now, self.own_gradients)
        super().backward(loss, divisor=divisor, **kwargs)
        for model, before in watched:
            if before.differ_from(self.own_gradients(model)):
                self._windows.close(model)

    # 4
    def exchange_held(self) -> None:
        for model in self._windows.open_models():
            self.exchange_model(model)
            self._windows.close(model)

    def note_held(self, model: nn.Module, held: bool) -> None:
        own = self.window_of(model)
        if own is not None:
            (self._windows.open if held else self._windows.close)(own)

    # 5
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Exchange what is held, then step; a closure makes its gradients itself. Every rank calls it, but where ranks train apart."""
        self.exchange_held()
        return super().step(optimizer, closure)

    # 8
    def close(self) -> None:
        super().close()
        self._windows.clear()


class Windows:
    """The models that may hold gradients of this rank alone, in an order that is the same on every rank, as their scripts are the same.

    What opens a window is entering `without_sync`, not what a rank finds there: a rank whose micro-batch failed takes part in the exchange, too.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._apart: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._backwards = 0

    @contextmanager
    def holding(
        self, model: nn.Module, held_by: AbstractContextManager[Any], apart: bool = False
    ) -> Iterator[None]:
        """Around micro-batches that `held_by` keeps from being exchanged."""
        known, backwards = model in self._open, self._backwards
        self._open[model] = None
        if apart:
            self._apart[model] = self._apart.get(model, 0) + 1
        try:
            with held_by:
                yield
            if not known and backwards == self._backwards:  # nobody asked the strategy to differentiate
                self.close(model)
        finally:
            if apart:
                self._apart[model] -= 1

    def begin_backward(
        self, synchronises: Callable[[nn.Module], bool], own_gradients: Callable[[nn.Module], Own]
    ) -> list[tuple[nn.Module, Before]]:
        """The models that this backward may exchange, with what they have before it."""
        self._backwards += 1
        if not self._open:
            return []
        return [(model, Before(own_gradients(model))) for model in list(self._open) if synchronises(model)]

    def open_models(self) -> list[nn.Module]:
        """Those whose gradients have to be exchanged before a step."""
        return [model for model in list(self._open) if not self._apart.get(model)] if self._open else []

    def open(self, model: nn.Module) -> None:
        """`model` holds gradients from elsewhere."""
        self._open[model] = None

    def close(self, model: nn.Module) -> None:
        """What `model` held is exchanged, or gone."""
        self._open.pop(model, None)

    def clear(self) -> None:
        """Forget all models."""
        self._open.clear()
        self._apart.clear()


class Before:
    """Gradients before a backward, to tell whether it reached them: torch counts the changes of a tensor."""

    def __init__(self, gradients: Own) -> None:
        self._gradients = gradients
        self._versions = [0 if gradient is None else gradient._version for gradient in gradients]

    def differ_from(self, gradients: Own) -> bool:
        """Whether one of them is another tensor now, or has changed."""
        return any(
            now is not before or (now is not None and now._version != version)
            for now, before, version in zip(gradients, self._gradients, self._versions, strict=True)
        )
