"""Counts micro-batches, knows the last batch, and says whether this step synchronises.

[Note: a window] A window is the run of micro-batches whose gradients are summed into one update. It ends at every `num_steps`-th
micro-batch, or at the last batch of the loader that is being iterated. A loop that is left in the middle of a window (`break`, an
exception) leaves the window broken: the next step outside `accumulate` counts, and the next window starts with empty gradients.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from torch.optim import Optimizer


class Handed(Protocol):
    """What a loader shows of the batch that is in use (see `data.position.LoaderPosition`)."""

    is_last: bool
    ends_window: bool  # the last batch of this rank or, where ranks have unequal numbers, of another one


class GradSync:
    """The accumulation counter of one Accelerator; its optimizers, schedulers and loaders look at this object.

    `sync`: whether the current micro-batch ends a window. `index`: micro-batches in the open window. `loaders`: the positions of
    the loaders being iterated, the one that handed out a batch most recently last.
    """

    __slots__ = (
        "__weakref__",
        "adjust_scheduler",
        "broken",
        "index",
        "loaders",
        "num_steps",
        "optimizers",
        "options",
        "steps",
        "sync",
        "sync_each_batch",
        "sync_with_loader",
    )

    def __init__(
        self,
        num_steps: int = 1,
        *,
        sync_with_loader: bool = True,
        sync_each_batch: bool = False,
        adjust_scheduler: bool = True,
    ) -> None:
        if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps must be a whole number of at least 1, got {num_steps!r}"
            )
        self.num_steps = num_steps
        self.sync_with_loader = sync_with_loader
        self.sync_each_batch = sync_each_batch
        self.adjust_scheduler = adjust_scheduler
        self.options: dict[str, Any] = {}  # what the user's GradientAccumulationPlugin changed
        self.sync = True
        self.index = 0
        self.steps = 0  # micro-batches since the beginning
        self.broken = False
        self.loaders: list[Handed] = []
        self.optimizers: weakref.WeakSet[Optimizer] = (
            weakref.WeakSet()
        )  # emptied when a broken window is dropped

    def advance(self) -> None:
        """One micro-batch begins."""
        if self.broken:
            self._drop_broken_window()
        self.steps += 1
        index = self.index + 1
        if index >= self.num_steps or (
            self.sync_with_loader and self.loaders and self.loaders[-1].ends_window
        ):
            self.index = 0
            self.sync = True
        else:
            self.index = index
            self.sync = False

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
        """A loader is no longer iterated; when the outermost one was left early, its open window is broken."""
        with contextlib.suppress(ValueError):
            self.loaders.remove(position)
        if not self.loaders and not finished:
            self.abandon()

    def abandon(self) -> None:
        """Forget the open window: a step from here on is a step."""
        if self.index:
            self.broken = True
        self.index = 0
        self.sync = True

    def reset(self) -> None:
        """As at the beginning, for the next run."""
        self.steps = self.index = 0
        self.sync = True
        self.broken = False
        self.optimizers.clear()

    def _drop_broken_window(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        """The position inside the window, for a checkpoint."""
        return {"index": self.index, "sync": self.sync, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.index = int(state["index"])
        self.sync = bool(state["sync"])
        self.steps = int(state.get("steps", 0))
        self.broken = False


class AdvanceOnly:
    """The context of `accumulate` where no model has gradients to hold back: shared, and it only counts."""

    __slots__ = ("_advance",)

    def __init__(self, grad_sync: GradSync) -> None:
        self._advance = grad_sync.advance

    def __enter__(self) -> None:
        self._advance()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


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
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, trace)
