"""The scheduler a script gets back: it moves only when the optimizer really stepped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import current_grad_sync
from acc_trainer.optimizer import AcceleratedOptimizer
from acc_trainer.state import PartialState


class AcceleratedScheduler:
    """Stands for `scheduler`, and asks `optimizers` whether they moved.

    A schedule is written for one process that sees every batch, so with several processes a step counts once for each of them, never
    past `total_steps`; with `split_batches` (the batch does not grow with the processes), and for a step that is given a metric or an
    epoch, it counts once. `step_with_optimizer=False` steps at every call.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self._grad_sync: GradSync | None = None
        self._num_processes: int | None = None
        self._seen: list[int] = []  # real updates of each optimizer when the schedule last moved

    def _bind(self, grad_sync: GradSync, num_processes: int) -> None:
        """Belong to an Accelerator."""
        self._grad_sync = grad_sync
        self._num_processes = num_processes

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Move the schedule, if the optimizer moved; what the scheduler's `step` returned."""
        if not self.step_with_optimizer:
            return self.scheduler.step(*args, **kwargs)
        sync = self._grad_sync if self._grad_sync is not None else current_grad_sync()
        if not sync.sync:
            return None
        updates = [getattr(optimizer, "_updates", 0) for optimizer in self.optimizers]
        if self._holds_still(updates):
            return None
        self._seen = updates
        if args or kwargs or self.split_batches or isinstance(self.scheduler, ReduceLROnPlateau):
            return self.scheduler.step(*args, **kwargs)
        return self._step_for_each_process()

    def _holds_still(self, updates: list[int]) -> bool:
        """Whether an optimizer skipped its last step, and made no other one since the schedule moved (a call once per epoch counts)."""
        seen = self._seen if len(self._seen) == len(updates) else [0] * len(updates)
        return any(
            getattr(optimizer, "step_was_skipped", False) and now == before
            for optimizer, now, before in zip(self.optimizers, updates, seen, strict=True)
        )

    def _step_for_each_process(self) -> Any:
        result = None
        for _ in range(
            self._num_processes if self._num_processes is not None else PartialState().num_processes
        ):
            if _has_ended(self.scheduler):
                break
            result = self.scheduler.step()
        return result

    def get_last_lr(self) -> Any:
        """As the scheduler's."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """As the scheduler's."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """As the scheduler's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the scheduler's."""
        self.scheduler.load_state_dict(state_dict)

    def _progress(self) -> dict[str, Any]:
        """Which updates the schedule has seen, for a checkpoint."""
        return {"seen": list(self._seen)}

    def _take_progress(self, state: Mapping[str, Any]) -> None:
        self._seen = [int(count) for count in state["seen"]]

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: half built, or being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_grad_sync": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _has_ended(scheduler: Any) -> bool:
    """Whether `scheduler`, or one inside it whose turn it is, has made its `total_steps` and would raise at another one."""
    total = getattr(scheduler, "total_steps", None)
    if total is not None and scheduler.last_epoch >= total:
        return True
    inner = getattr(scheduler, "_schedulers", ())  # of torch's ChainedScheduler and SequentialLR
    milestones = getattr(scheduler, "_milestones", None)
    if inner and milestones is not None:
        inner = [inner[bisect_right(milestones, scheduler.last_epoch + 1)]]
    return any(_has_ended(one) for one in inner)


def belongs_to(scheduler: Any, optimizer: AcceleratedOptimizer) -> bool:
    """Whether `scheduler` was built on `optimizer` or on the one inside."""
    own = getattr(scheduler, "optimizer", None)
    return own is optimizer or own is optimizer.optimizer
