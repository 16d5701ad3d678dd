"""The optimizer a script gets back: it steps only at the end of a window, and says whether it really did."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from acc_ops.tree import send_to_device
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.precisions.scaler import step_and_tell
from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import current_grad_sync
from acc_trainer.lomo import is_lomo, stepped_in_backward


class AcceleratedOptimizer(Optimizer):
    """Stands for `optimizer`: state, parameter groups and hooks are those of `optimizer` itself.

    `step` and `zero_grad` do something only when gradients are synchronised. `step` returns what the optimizer returns, `step_was_skipped`
    tells from the effect whether the last call moved nothing: an fp16 overflow, or a micro-batch inside a window. A `scaler` (a GradScaler)
    is only for optimizers built by hand; `Accelerator.prepare` uses its strategy.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: Any = None) -> None:
        # Optimizer.__init__ is left out on purpose: it would make groups of its own and wrap `step` once more
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self._grad_sync: GradSync | None = None
        self._strategy_step: Callable[[Optimizer, Any], StepOutcome] | None = None
        self._skipped = False
        self._updates = 0  # steps that really ran
        self._accelerate_step_called = False  # see patch_optimizer_step

    def _bind(self, grad_sync: GradSync, strategy_step: Callable[[Optimizer, Any], StepOutcome]) -> None:
        """Belong to an Accelerator: its counter decides when, its strategy how."""
        if (
            self._grad_sync is not None
        ):  # an earlier Accelerator's, which must not drop these gradients any more
            self._grad_sync.optimizers.discard(self)
        self._grad_sync = grad_sync
        self._strategy_step = strategy_step
        grad_sync.optimizers.add(self)

    @property
    def grad_sync(self) -> GradSync:
        """The accumulation counter that decides when to step."""
        return self._grad_sync if self._grad_sync is not None else current_grad_sync()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: half built, or being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer does."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.load_state_dict(dict(state_dict))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, when they are synchronised; `set_to_none` is True unless given.

        Raises `ValueError` when `set_to_none` is given and the optimizer does not know it.
        """
        grad_sync = self.grad_sync
        if not grad_sync.sync:
            return
        grad_sync.pending = False
        grad_sync.drop_held(self.optimizer)
        if set_to_none is None:
            self.optimizer.zero_grad()
        elif "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            raise ValueError(f"zero_grad of {type(self.optimizer).__name__} has no set_to_none: leave it out")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, when gradients are synchronised; what the optimizer's `step` returned, None where it did not run."""
        grad_sync = self.grad_sync
        if not grad_sync.sync:
            self._skipped = True
            return None
        grad_sync.pending = False
        ran, result = self._run(closure)
        self._skipped = not ran
        self._updates += ran
        return result

    def _run(self, closure: Callable[[], Any] | None) -> StepOutcome:
        if self._strategy_step is not None:
            return self._strategy_step(self.optimizer, closure)
        if is_lomo(self.optimizer):
            return stepped_in_backward(self.optimizer, closure)
        if self.scaler is None or not self.scaler.is_enabled():
            return Precision().step(self.optimizer, closure)
        outcome = step_and_tell(self.scaler, self.optimizer, closure)
        self.scaler.update()
        return outcome

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` moved no weight."""
        return self._skipped

    def _progress(self) -> dict[str, Any]:
        """What schedules ask about, for a checkpoint."""
        return {"updates": self._updates, "skipped": self._skipped}

    def _take_progress(self, state: Mapping[str, Any]) -> None:
        self._updates, self._skipped = int(state["updates"]), bool(state["skipped"])

    def train(self) -> None:
        """For optimizers that know it (schedule-free ones): the weights to train with."""
        if callable(method := getattr(self.optimizer, "train", None)):
            method()

    def eval(self) -> None:
        """For optimizers that know it (schedule-free ones): the weights to evaluate with."""
        if callable(method := getattr(self.optimizer, "eval", None)):
            method()

    # torch defines these on the class, so they would not reach __getattr__
    def register_step_pre_hook(self, hook: Any) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the optimizer itself."""
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scaler": self.scaler, "device_placement": self.device_placement}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state,
            _grad_sync=None,
            _strategy_step=None,
            _skipped=False,
            _updates=0,
            _accelerate_step_called=False,
        )


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """`method` (an optimizer's own `step`), which also sets `_accelerate_step_called` on the wrapper: it really ran.

    For code that steps the inner optimizer in a way of its own; `step_was_skipped` does not need it.
    """

    @functools.wraps(method)
    def patched(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return patched


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """An optimizer's state with its tensors on `device`."""
    return send_to_device(state, device)
