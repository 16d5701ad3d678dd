"""LOMO optimizers (the lomo-optim package): they update each weight while the backward pass goes by, so no gradient is ever kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from acc_plugins.outcome import StepOutcome

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator

_LIBRARY = "lomo_optim"


def is_lomo(optimizer: Any) -> bool:
    """Whether `optimizer`, or the one in its wrapper, is of lomo-optim; asked by its class, so that nothing has to be installed."""
    own = getattr(optimizer, "optimizer", optimizer)
    return any(kind.__module__.partition(".")[0] == _LIBRARY for kind in type(own).__mro__)


def stepped_in_backward(optimizer: Any, closure: Any = None) -> StepOutcome:  # noqa: ARG001  as Strategy.step
    """What `step` of a LOMO optimizer does: nothing, its weights moved in backward."""
    return StepOutcome(True)


def backward(accelerator: Accelerator, loss: torch.Tensor, learning_rate: float | None) -> None:
    """Differentiate `loss` and update with `learning_rate`, through every LOMO optimizer that was prepared.

    Raises `ValueError` without a learning rate, without a LOMO optimizer, and in fp16, whose scaled gradients they would apply.
    """
    if learning_rate is None:
        raise ValueError(
            "a LOMO optimizer updates during backward, so it needs the rate there: pass learning_rate="
        )
    optimizers = [one.optimizer for one in accelerator._optimizers if is_lomo(one)]
    if not optimizers:
        raise ValueError(
            "lomo_backward needs an optimizer of lomo-optim (Lomo, AdaLomo), and none was given to prepare(): use backward(loss)"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            "a LOMO optimizer applies gradients before they can be unscaled, which mixed_precision='fp16' needs: use 'bf16' or 'no'"
        )
    for optimizer in optimizers:
        optimizer.fused_backward(loss, learning_rate)  # type: ignore[attr-defined]
