"""What is clipped: parameters whose gradients have their true size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from acc_ops.callers import warn_caller
from acc_plugins.precisions.scaler import StepScaler
from acc_plugins.strategies.clip import unique_parameters

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator


def with_true_gradients(
    accelerator: Accelerator, given: nn.Module | Tensor | Iterable[Tensor]
) -> Tensor | Iterable[Tensor]:
    """The parameters given, or those of a module, with the gradients of all prepared optimizers unscaled.

    Warns of gradients that stay scaled (fp16) because nobody has said which optimizer they belong to.
    """
    accelerator.unscale_gradients()
    parameters = given.parameters() if isinstance(given, nn.Module) else given
    scaler = accelerator.precision.scaler
    if not isinstance(scaler, StepScaler) or not scaler.is_enabled():
        return parameters
    listed = unique_parameters(parameters)
    true = {id(p) for one in scaler.unscaled for group in one.param_groups for p in group["params"]}
    scaled = [p for p in listed if p.grad is not None and id(p) not in true]
    if scaled:
        warn_caller(
            f"{len(scaled)} of the {len(listed)} parameters to clip belong to no prepared optimizer, so with mixed_precision='fp16' their "
            "gradients are still multiplied by the scale of the loss, and are clipped far too much: give prepare() their optimizer, or call "
            "accelerator.unscale_gradients(optimizer) before clipping"
        )
    return listed
