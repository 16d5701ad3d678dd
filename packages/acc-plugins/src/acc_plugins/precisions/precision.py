"""A precision decides in which number format a forward runs; this base is float32 and does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from acc_ops.enums import FP8BackendType
from acc_ops.unwrap import extract_model_from_parallel
from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.forward import around_of, restore_forward

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer


class Precision:
    """float32: the model's own number format. Other precisions override what differs.

    The calls it receives, in order:

    1. `wrap(model)` once, in prepare;  `context()` around code of the user's that wants the same treatment
    2. `scale(loss)` at every backward
    3. `unscale(optimizer)` before gradients are looked at or clipped, any number of times
    4. `step(optimizer)`
    5. `state_dict()` / `load_state_dict()` around a checkpoint
    6. `unwrap(model)`: undoes `wrap`
    """

    name: ClassVar[str] = "no"
    scaler: GradScaler | None = None
    fp8_backend: ClassVar[FP8BackendType] = FP8BackendType.NO  # the library that computes in fp8

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to train with: here the very same, without what the precision of an earlier run did around its forward."""
        for one in (model, extract_model_from_parallel(model, keep_torch_compile=False)):
            if getattr(around_of(one), "of_a_precision", False):
                restore_forward(one)
        return model

    def agree_over(self, world: World) -> None:
        """Ranks of `world` have parts of the same gradients: what one finds in its part counts for all. Nothing to agree on here."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as it was before `wrap`."""
        return model

    def context(self, **autocast_options: Any) -> AbstractContextManager[Any]:  # noqa: ARG002  same signature everywhere
        """A context in which forwards run as they do in a wrapped model; options as for `torch.autocast`."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients of `optimizer` their true size. Calling it again before the step changes nothing."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Step `optimizer`, and say whether it really stepped."""
        return StepOutcome(True, optimizer.step() if closure is None else optimizer.step(closure))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: nothing here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ValueError when it belongs to a precision that keeps one and this one does not."""
        if state:
            raise ValueError(
                f"the checkpoint holds the state of a gradient scaler ({', '.join(sorted(state))}), but precision "
                f"{self.name!r} has none: train with mixed_precision='fp16', or leave that state out"
            )
