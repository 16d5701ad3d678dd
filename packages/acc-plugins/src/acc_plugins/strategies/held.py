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

from acc_ops.regions import is_compiled_module
from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Bundle, Strategy

Own = Sequence[Tensor | None]  # gradients of one model as they lie on this rank


class SynchronisingStrategy(Strategy):
    """A strategy over several ranks. A subclass says what a model holds on this rank, when it synchronises, and how that is exchanged.

    Models that it trains live until `close`: were one collected on some ranks only, these would exchange less than the others.
    """

    synchronises: ClassVar[bool] = True
    can_train_apart: ClassVar[bool] = True  # whole models; else a step exchanges under `apart`, too

    def __init__(self, world: World, precision: Precision, *, save_on_each_node: bool = False) -> None:
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        self._training: dict[nn.Module, None] = {}  # in the order of prepare, the same on every rank
        self._windows = Windows()

    def exchanges(self, model: nn.Module) -> bool:
        """Whether this very module is one whose gradients are exchanged, as the calls below get it."""
        raise NotImplementedError

    def held_back(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around micro-batches whose gradients stay on this rank."""
        raise NotImplementedError

    def synchronised(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around a backward that exchanges, though its forward was `held_back`."""
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

    def exchange_unreached(self, model: nn.Module, reached: Sequence[bool]) -> None:  # noqa: ARG002
        """Average what of a checkpoint's gradients a backward that synchronised has not `reached`: nobody else knows of them."""
        self.exchange_model(model)

    def window_of(self, model: nn.Module) -> nn.Module | None:
        """The module that `exchanges` in what torch.compile made of one, or `model` itself; None for a model without any."""
        inner: nn.Module | None = model
        while inner is not None and not self.exchanges(inner):
            inner = _in_shell(inner)
        return inner

    # 1
    def prepare(self, bundle: Bundle) -> Bundle:
        made = super().prepare(bundle)
        if not bundle.evaluation:
            self._training.update(dict.fromkeys(made.models))
        return made

    # 2
    def without_sync(self, model: nn.Module, apart: bool = False) -> AbstractContextManager[Any]:
        own = self.window_of(model)
        if own is None:
            return super().without_sync(model, apart)
        return self._windows.holding(own, self.held_back(own), apart and self.can_train_apart)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        own = self.window_of(model)
        return super().sync_next_backward(model) if own is None else self.synchronised(own)

    # 3
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        watched = self._windows.begin_backward(self.synchronises_now, self.own_gradients)
        super().backward(loss, divisor=divisor, **kwargs)
        for model, before in watched:
            reached = before.reached(self.own_gradients(model))
            if any(reached):
                if self._windows.is_resumed(model):
                    self.exchange_unreached(model, reached)
                self._windows.close(model)

    # 4
    def exchange_held(self) -> None:
        for model in self._windows.open_models():
            self.exchange_model(model)
            self._windows.close(model)

    def note_held(self, model: nn.Module, held: bool) -> None:
        own = self.window_of(model)
        if own is not None:
            (self._windows.resume if held else self._windows.close)(own)

    # 5
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Exchange what is held, then step; a closure makes its gradients itself. Every rank calls it, but where ranks train apart."""
        self.exchange_held()
        return super().step(optimizer, closure)

    # 8
    def close(self) -> None:
        super().close()
        self._training.clear()
        self._windows.clear()


class Windows:
    """The models that may hold gradients of this rank alone, in an order that is the same on every rank, as their scripts are the same.

    What opens a window is entering `without_sync`, not what a rank finds or does there: one whose micro-batches failed, or were left out, takes part in
    the exchange, too. A model lives until its window is closed, see `SynchronisingStrategy`.
    """

    def __init__(self) -> None:
        self._open: dict[nn.Module, bool] = {}  # whether a checkpoint has opened it
        self._apart: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    @contextmanager
    def holding(
        self, model: nn.Module, held_by: AbstractContextManager[Any], apart: bool = False
    ) -> Iterator[None]:
        """Around micro-batches that `held_by` keeps from being exchanged."""
        self._open.setdefault(model, False)
        before = self._apart.get(model, 0)
        self._apart[model] = before + apart
        try:
            with held_by:
                yield
        finally:
            self._apart[model] = before

    def begin_backward(
        self, synchronises: Callable[[nn.Module], bool], own_gradients: Callable[[nn.Module], Own]
    ) -> list[tuple[nn.Module, Before]]:
        """The models that this backward may exchange, with what they have before it."""
        if not self._open:
            return []
        return [(model, Before(own_gradients(model))) for model in self._open if synchronises(model)]

    def open_models(self) -> list[nn.Module]:
        """Those whose gradients have to be exchanged before a step."""
        return [model for model in self._open if not self._apart.get(model)] if self._open else []

    def resume(self, model: nn.Module) -> None:
        """`model` holds gradients from a checkpoint."""
        self._open[model] = True

    def is_resumed(self, model: nn.Module) -> bool:
        """Whether it does, and has not been exchanged since."""
        return self._open.get(model, False)

    def close(self, model: nn.Module) -> None:
        """What `model` held is exchanged, or gone."""
        self._open.pop(model, None)

    def clear(self) -> None:
        """Forget all models."""
        self._open.clear()
        self._apart.clear()


class Before:
    """Gradients before a backward, to tell which of them it reached: torch counts the changes of a tensor."""

    def __init__(self, gradients: Own) -> None:
        self._gradients = gradients
        self._versions = [0 if gradient is None else gradient._version for gradient in gradients]

    def reached(self, gradients: Own) -> list[bool]:
        """Of each, whether it is another tensor now, or has changed."""
        return [
            now is not before or (now is not None and now._version != version)
            for now, before, version in zip(gradients, self._gradients, self._versions, strict=True)
        ]


def _in_shell(model: nn.Module) -> nn.Module | None:
    """What torch.compile was given, or `compile_regions`, to make `model`; None for one that neither made."""
    shell: Any = model
    inner: nn.Module | None = shell._orig_mod if is_compiled_module(shell) else vars(shell).get("_orig_mod")
    return inner
