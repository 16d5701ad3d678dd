"""Autocast precisions: a forward computes in bfloat16 or float16, weights and outputs stay float32.

[Note: where the numbers are what] Weights, gradients and optimizer state: float32. Inside forward: autocast picks the low format operation by
operation. Outputs: float32, in whatever structure the model returns. float16 has a narrow range, so its loss is scaled up before backward
and its gradients down before the step (`scaler.py`); bfloat16 needs none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acc_ops.precision import convert_to_fp32
from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.forward import restore_forward, surround_forward
from acc_plugins.precisions.precision import Precision
from acc_plugins.precisions.scaler import StepScaler


@dataclass(frozen=True)
class Autocast:
    """Runs a forward under `torch.autocast` and gives its outputs back in float32."""

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = None
    of_a_precision: ClassVar[bool] = True  # a run in float32 takes it away

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # a context of its own per call: torch's keeps what it must restore in itself, and forwards may nest
        with torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        ):
            outputs = forward(*args, **kwargs)
        return convert_to_fp32(outputs)


class BFloat16Autocast(Precision):
    """bf16: forwards under autocast to bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def __init__(
        self, device: torch.device | str, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        """`enabled` and `cache_enabled` are `torch.autocast`'s."""
        self.device_type = torch.device(device).type
        self._autocast = Autocast(self.device_type, self.dtype, enabled, cache_enabled)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Let the forwards of `model` run under autocast; the same object back. See `forward.py` for how."""
        return surround_forward(model, self._autocast)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Put the forward of `model` back."""
        return restore_forward(model)

    def context(self, **autocast_options: Any) -> AbstractContextManager[Any]:
        """`torch.autocast` as in a wrapped model; `enabled` and `cache_enabled` may be given for this block."""
        options = {
            "enabled": self._autocast.enabled,
            "cache_enabled": self._autocast.cache_enabled,
            **autocast_options,
        }
        return torch.autocast(self.device_type, dtype=self.dtype, **options)


class Float16Autocast(BFloat16Autocast):
    """fp16: forwards under autocast to float16, with a scaled loss."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16

    def __init__(
        self,
        device: torch.device | str,
        *,
        scaler_options: Mapping[str, Any] | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """`scaler_options` go to the gradient scaler (`init_scale`, `growth_interval`, ...)."""
        super().__init__(device, enabled=enabled, cache_enabled=cache_enabled)
        self.scaler: StepScaler = StepScaler(self.device_type, **(scaler_options or {}))

    def agree_over(self, world: World) -> None:
        """An overflow in one rank's part is one for all: they skip the step together."""
        self.scaler.agree = lambda flag: world.comm.all_reduce(flag, "max")

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; once per step, however often it is asked for."""
        self.scaler.unscale_once(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Step unless a gradient overflowed. Raises ValueError for a closure, which would need its own unscaling."""
        if closure is not None:
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) cannot be used with mixed_precision='fp16': the gradients that the closure makes "
                "would have to be unscaled inside the optimizer. Use mixed_precision='bf16' or 'no' for closures"
            )
        return self.scaler.step_and_tell(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the scale of `state`. Raises ValueError when it holds none."""
        if self.scaler.is_enabled() and "scale" not in state:
            raise ValueError(
                f"the state of a gradient scaler must have 'scale', got keys {sorted(state)}: the checkpoint was not written with "
                "mixed_precision='fp16'"
            )
        self.scaler.load_state_dict(state)
