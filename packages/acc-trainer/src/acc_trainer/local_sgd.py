"""Local SGD: every process trains on its own for some steps, then the weights are averaged."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from acc_ops.collectives import reduce

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator

_REPLICATED = ("single", "ddp", "replicated")  # strategies with a whole model on every process


class LocalSGD:
    """Around a training loop: no gradient leaves the process, and `step` averages the weights every `local_sgd_steps` steps and at the end.

    Inactive on one process and with `enabled=False`. Raises `ValueError` for fewer than one step, and `NotImplementedError` where no
    process has the whole model.
    """

    def __init__(
        self, accelerator: Accelerator, model: Any, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be a whole number of at least 1, got {local_sgd_steps!r}")
        if accelerator.strategy.name not in _REPLICATED:
            raise NotImplementedError(
                f"LocalSGD averages whole models, but strategy {accelerator.strategy.name!r} has none on a process"
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._held: Any = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.num_steps = 0
            self._held = self.accelerator.no_sync(self.model)
            self._held.__enter__()
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._held.__exit__(type, value, tb)
        if type is None:  # a failing process must not wait for the others, nor spread its weights
            self._sync_and_avg_model_params()

    def step(self) -> None:
        """One step was made; average the weights when it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._sync_and_avg_model_params()

    def _sync_and_avg_model_params(self) -> None:
        """Every process has the mean of all processes' weights."""
        own = list(self.model.parameters())
        with torch.no_grad():
            mean = reduce([parameter.data for parameter in own], "mean", world=self.accelerator.world)
            for parameter, value in zip(own, mean, strict=True):
                parameter.data.copy_(value)
