"""The fp16 gradient scaler: it says whether a step ran, and keeps one scale for all optimizers of an iteration.

[Note: when the scale may change] A scale may only change when no gradient made with the old one is left to be unscaled. torch leaves that to the
loop ("update once, after all optimizers"). Here `update` after a step only notes that it is due, and the next `scale` (the next
backward) does it; so two optimizers that step one after the other see the same scale, and whoever reads the scale or saves it sees the new one.
A loop may also drop a window: unscale, look at the norm, zero the gradients and go on. Then the next backward closes the window, so
that an overflow found in it still lowers the scale.

[Note: shards] Where a rank holds shards of the gradients, an overflow may be in another rank's. A strategy that shards sets `agree`: then the ranks
share what they found whenever an optimizer is unscaled, which all of them do, also one that has no gradient at all.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from acc_ops.devices import device_row
from acc_ops.world import current_world
from acc_plugins.outcome import StepOutcome
from acc_plugins.strategies.clip import local_part


class StepScaler(GradScaler):
    """A `torch.amp.GradScaler` with `unscale_once` and `step_and_tell`, whose update waits for the next backward."""

    agree: Callable[[Tensor], Any] | None = (
        None  # makes the 0-dim flag "I overflowed" the largest of all ranks, in place
    )

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self._due = False
        self._unscaled: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # in this window; stepped ones too
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # unscaled, and a backward came before the step: what the gradients were before it
        self._stale: weakref.WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = weakref.WeakKeyDictionary()

    @property
    def unscaled(self) -> list[Optimizer]:
        """Those whose gradients have their true size by now."""
        return list(self._unscaled)

    def unscale_once(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of `optimizer` unless that was done since its last step; without gradients do nothing.

        Raises RuntimeError when a backward added to them between an earlier unscaling and now: part of the gradient would be scaled.
        """
        self._refuse_mixed(optimizer)
        if optimizer not in self._unscaled and self._is_due(optimizer):
            self._unscaled.add(optimizer)
            self.unscale_(optimizer)

    def step_and_tell(self, optimizer: Optimizer) -> StepOutcome:
        """Step `optimizer` unless its gradients overflowed, and say which of the two it was."""
        if not self._is_due(optimizer):
            return StepOutcome(True, optimizer.step())
        if self.agree is None:
            self._refuse_mixed(optimizer)
        else:
            self.unscale_once(optimizer)  # a fused optimizer would look at its own gradients only
        outcome = step_and_tell(self, optimizer)
        self._unscaled.add(optimizer)
        self._stepped.add(optimizer)
        self._due = True
        return outcome

    def unscale_(self, optimizer: Optimizer) -> None:
        """As `GradScaler.unscale_`. Raises ValueError for float16 weights, saying what to do."""
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            if "FP16" not in str(error):
                raise
            raise ValueError(
                f"{type(optimizer).__name__} trains weights that are float16 themselves, whose gradients cannot be unscaled in float16: keep "
                "the trained weights in float32 (model.float(); mixed_precision='fp16' computes in float16 all the same), or freeze them"
            ) from error
        if self.agree is not None and self._scale is not None:
            flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            flag = sum(
                (found.to(self._scale.device) for found in flags.values()), torch.zeros_like(self._scale)
            )
            self.agree(flag)
            for device in flags or [self._scale.device]:
                flags[device] = flag.to(device)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """With `agree` of what this rank holds: torch cannot unscale DTensors of several meshes, or beside plain gradients, in one go."""
        held: Any = optimizer if self.agree is None else _Held(optimizer)
        return super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16)

    def _is_due(self, optimizer: Optimizer) -> bool:
        """Whether there is something to unscale; with `agree` a rank without gradients takes part all the same."""
        if self.agree is not None:
            return self.is_enabled() and self._scale is not None
        return self.is_enabled() and _has_gradients(optimizer)

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        before = self._stale.pop(optimizer, None)
        if before is not None and before != _versions(optimizer):
            raise RuntimeError(
                "gradients that were unscaled (by clipping, say) got another backward before the optimizer stepped, so they mix two "
                "scales: inside an accumulation window clip only `if accelerator.sync_gradients`; else call optimizer.step() or "
                "optimizer.zero_grad(set_to_none=True) before the next backward"
            )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Note that the scale is to be updated before the next backward; a `new_scale` is set at once."""
        if new_scale is None:
            self._due = True
        else:
            self._close_window(new_scale)

    def scale(self, outputs: Any) -> Any:
        """`outputs` times the scale, which is brought up to date first."""
        if self._unscaled or self._due:
            self._catch_up()
        return super().scale(outputs)

    def get_scale(self) -> float:
        """The scale of the next backward."""
        self._catch_up()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """As `GradScaler.state_dict`, up to date."""
        self._catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `GradScaler.load_state_dict`; the window that was open before is closed, so that it cannot touch the loaded scale."""
        if self._unscaled:
            self._close_window()
        self._due = False
        super().load_state_dict(dict(state_dict))

    def _catch_up(self) -> None:
        """Update the scale if nothing made with the present one is still needed."""
        waiting = [o for o in self._unscaled if o not in self._stepped and _has_gradients(o)]
        if waiting:
            for optimizer in waiting:
                self._stale.setdefault(optimizer, _versions(optimizer))
        elif self._due or self._unscaled:
            self._close_window()

    def _close_window(self, new_scale: float | Tensor | None = None) -> None:
        self._due = False
        for seen in (self._unscaled, self._stepped, self._stale):
            seen.clear()
        super().update(new_scale)


class _Held:
    """The gradients that this rank holds of an optimizer's, as torch looks through them: writing to them writes to the optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        held = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    stand_in = local_part(p.detach())
                    stand_in.grad = local_part(p.grad)
                    held.append(stand_in)
        self.param_groups = [{"params": held}]


def step_and_tell(
    scaler: GradScaler, optimizer: Optimizer, closure: Callable[[], Any] | None = None
) -> StepOutcome:
    """Step `optimizer` through any enabled `scaler`, and say whether its gradients overflowed, so that it did not move."""
    arguments = () if closure is None else (closure,)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # a fused kernel skips by itself, on the device: the flag must be fetched
        result = scaler.step(optimizer, *arguments)
        flags = scaler._found_inf_per_device(optimizer).values()
        return StepOutcome(not any(flag.item() for flag in flags), result)
    # torch fetches the flag to decide; whether step was entered tells us without fetching it again
    entered: list[bool] = []
    handle = optimizer.register_step_post_hook(lambda *_: entered.append(True))
    try:
        result = scaler.step(optimizer, *arguments)
    finally:
        handle.remove()
    return StepOutcome(bool(entered), result)


def get_grad_scaler(distributed_type: str | None = None, **options: Any) -> Any:
    """The gradient scaler torch has for this set-up and the current world's device; options go to its constructor.

    "FSDP" gives torch's sharded scaler. Raises ValueError for a kind of device that has none.
    """
    kind = current_world().device.type
    if not device_row(kind).grad_scaler:
        raise ValueError(
            f"torch {torch.__version__} has no gradient scaler for {kind}: use mixed_precision='bf16', or for mps torch 2.8 or newer"
        )
    if distributed_type == "FSDP":
        sharded = importlib.import_module(
            "torch.distributed.fsdp.sharded_grad_scaler"
        )  # half a second: only when asked for
        return sharded.ShardedGradScaler(device=kind, **options)
    return GradScaler(kind, **options)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Which gradient tensors there are, and torch's count of what was written to each: a backward changes one or the other."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]
