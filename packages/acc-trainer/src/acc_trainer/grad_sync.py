"""Counts micro-batches, knows the last batch, and says whether this step synchronises.

[Note: a window] A window is the run of micro-batches whose gradients are summed into one update. It ends at every `num_steps`-th
micro-batch, or at the last batch of the loader that is being iterated. A loop that is left before the window's step (`break`, an
exception) leaves the window broken, and so does an exception in its last micro-batch: the next step outside `accumulate` counts, and
the next window starts with empty gradients. An exception in another micro-batch of a prepared loader, caught inside the loop, loses
that micro-batch alone; without a loader nobody would tell that the loop was left, so there any exception breaks the window.

[Note: a short window] Every loss is divided by `num_steps`, as specified, so the update of a last window with fewer micro-batches is that
much smaller. With `average_short_window` its last micro-batch starts by scaling the gradients there are as if they had been divided by
their true number, by which it divides its own: the mean, wherever clipping looks and however many backwards there are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from torch.optim import Optimizer

from acc_ops.callers import warn_caller


class Handed(Protocol):
    """What a loader shows of the batch that is in use (see `data.position.LoaderPosition`)."""

    is_last: bool
    ends_window: bool  # the last batch of this rank or, where ranks have unequal numbers, of another one


class Held(Protocol):
    """A place of gradients that are held back (see `acc_plugins.strategies.gradients`)."""

    def give(self, saved: None) -> None: ...

    def scale(self, factor: float) -> None: ...


class Holder(Protocol):
    """A strategy that may hold gradients back where no parameter shows them."""

    def held_gradients(self) -> Iterable[Held]: ...

    def drop_held(self, optimizer: Optimizer) -> None: ...


class GradSync:
    """The accumulation counter of one Accelerator; its optimizers, schedulers and loaders look at this object.

    `sync`: whether the current micro-batch ends a window. `index`: micro-batches in the open window. `loaders`: the positions of
    the loaders being iterated, the one that handed out a batch most recently last.
    """

    __slots__ = (
        "__weakref__",
        "_short",
        "adjust_scheduler",
        "average_short_window",
        "broken",
        "holder",
        "index",
        "inside",
        "loaders",
        "num_steps",
        "optimizers",
        "options",
        "pending",
        "reading",
        "steps",
        "sync",
        "sync_each_batch",
        "sync_with_loader",
        "xla_synced",
    )

    def __init__(
        self,
        num_steps: int = 1,
        *,
        sync_with_loader: bool = True,
        sync_each_batch: bool = False,
        adjust_scheduler: bool = True,
        average_short_window: bool = False,
    ) -> None:
        if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps must be a whole number of at least 1, got {num_steps!r}"
            )
        self.num_steps = num_steps
        self.sync_with_loader = sync_with_loader
        self.sync_each_batch = sync_each_batch
        self.adjust_scheduler = adjust_scheduler
        self.average_short_window = average_short_window
        self.options: dict[str, Any] = {}  # what the user's GradientAccumulationPlugin changed
        self.sync = True
        self.index = 0
        self.steps = 0  # micro-batches since the beginning
        self.broken = False
        self.inside = False  # whether the last micro-batch came in a loop over a loader that goes on
        self.pending = False  # whether nobody has stepped since the micro-batch began
        self._short = 0  # micro-batches of a short window that ends now
        self.xla_synced = False  # see GradientState.is_xla_gradients_synced
        # what a step timer puts around the batches of a pass
        self.reading: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        self.loaders: list[Handed] = []
        # emptied when a broken window is dropped
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.holder: Callable[[], Holder | None] | None = (
            None  # a weak reference: this object may outlive the run
        )

    def advance(self) -> None:
        """One micro-batch begins."""
        if self.broken:
            self._drop_broken_window()
        self.steps += 1
        self.pending = True
        self.inside = bool(self.loaders)
        self._short = 0
        index = self.index + 1
        if index >= self.num_steps:
            self.index = 0
            self.sync = True
        elif self.sync_with_loader and self.loaders and self.loaders[-1].ends_window:
            self.index = 0
            self.sync = True
            if self.average_short_window:
                self._shorten_window(index)
        else:
            self.index = index
            self.sync = False

    @property
    def divisor(self) -> int:
        """What a loss is divided by: `num_steps`, unless a short window is averaged."""
        return self._short or self.num_steps

    @property
    def end_of_loader(self) -> bool:
        """Whether the batch in use is the last one of its loader."""
        return bool(self.loaders) and self.loaders[-1].is_last

    def enter(self, position: Handed) -> None:
        """A loader begins to be iterated."""
        self.loaders.append(position)

    def raise_to_top(self, position: Handed) -> None:
        """`position` hands out a batch while another loader is still open: its end is the one that counts now."""
        with contextlib.suppress(ValueError):
            self.loaders.remove(position)
        self.loaders.append(position)

    def leave(self, position: Handed, *, finished: bool) -> None:
        """A loader is no longer iterated; when the outermost one was left early, the window that was open in it is broken."""
        with contextlib.suppress(ValueError):
            self.loaders.remove(position)
        if not self.loaders:
            self._short = 0
            if self.inside and not finished:
                self.abandon()
            self.inside = False

    def abandon(self) -> None:
        """Forget the window that has not stepped: a step from here on is a step."""
        if self.index or self.pending:
            self.broken = True
        self.index = 0
        self.sync = True

    def fail(self) -> None:
        """A micro-batch ended in an exception. In the last of a window, there will be no step; outside a loader, nobody tells of the end."""
        if self.sync or not self.loaders:
            self.abandon()

    def reset(self) -> None:
        """As at the beginning, for the next run."""
        self.steps = self.index = self._short = 0
        self.sync = True
        self.broken = self.pending = self.inside = False
        self.optimizers.clear()

    def drop_held(self, optimizer: Optimizer) -> None:
        """What a strategy holds back of its parameters goes with their gradients."""
        holder = None if self.holder is None else self.holder()
        if holder is not None:
            holder.drop_held(optimizer)

    def _held(self) -> Iterable[Held]:
        holder = None if self.holder is None else self.holder()
        return () if holder is None else holder.held_gradients()

    def _drop_broken_window(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for place in self._held():
            place.give(None)
        self.broken = False

    def _shorten_window(self, size: int) -> None:
        """The window ends with this micro-batch, its `size`-th: give the gradients of those before their share of a mean."""
        self._short = size
        if size == 1:
            return
        if not self.optimizers:
            warn_caller(
                f"average_short_window has no prepared optimizer whose gradients it could scale, so the last window, of {size} micro-batches, is "
                "no mean: give prepare() the optimizer"
            )
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        parameters = {id(p): p for group in groups for p in group["params"]}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_steps / size)
        for place in self._held():
            place.scale(self.num_steps / size)

    def state_dict(self) -> dict[str, Any]:
        """The position inside the window, for a checkpoint."""
        return {"index": self.index, "sync": self.sync, "steps": self.steps, "broken": self.broken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.index = int(state["index"])
        self.sync = bool(state["sync"])
        self.steps = int(state.get("steps", 0))
        self.broken = bool(state.get("broken", False))
        self.pending = False


class AdvanceOnly:
    """The context of `accumulate` where no model has gradients to hold back: shared, and it only counts."""

    __slots__ = ("_advance", "_fail")

    def __init__(self, grad_sync: GradSync) -> None:
        self._advance = grad_sync.advance
        self._fail = grad_sync.fail

    def __enter__(self) -> None:
        self._advance()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._fail()


class HoldBack:
    """The context of `accumulate` that keeps several ranks from exchanging gradients inside a window."""

    __slots__ = ("_entered", "_grad_sync", "_models", "_without_sync")

    def __init__(
        self,
        grad_sync: GradSync,
        without_sync: Callable[[Any], contextlib.AbstractContextManager[Any]],
        models: Sequence[Any],
    ) -> None:
        self._grad_sync = grad_sync
        self._without_sync = without_sync
        self._models = models
        self._entered: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        grad_sync = self._grad_sync
        grad_sync.advance()
        if grad_sync.sync or grad_sync.sync_each_batch:
            return
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(self._without_sync(model))
            self._entered = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._grad_sync.fail()
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, trace)
