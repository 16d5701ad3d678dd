"""One stage as torch.distributed.pipelining runs it: a module from what was handed on, and the batch, to what is handed on next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acc_plugins.pipeline.graph import Cut, Outputs


class StageModule(nn.Module):
    """`cut.module`, with the batch by name, and with the loss at the end of the last stage (a tensor of one element).

    What it hands on can always be differentiated, also where all weights up to there are frozen, as torch's schedules expect.
    """

    def __init__(self, cut: Cut, outputs: Outputs, loss: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.graph_module = cut.module
        self.batch = cut.batch
        self.anchor = nn.Parameter(torch.zeros(()))  # no part of the model
        self._outputs = outputs
        self._loss = loss

    def forward(self, *taken: Tensor, **batch: Any) -> Any:
        given = [batch[f"batch_{number}"] for number in self.batch]
        made = self.graph_module(*taken, *given)
        if self._loss is None:
            return tuple(_Joined.apply(self.anchor, value) for value in made)
        loss = self._loss(self._outputs.of(made), batch.get("batch_target"))
        return _Joined.apply(self.anchor, loss.reshape(1))


class _Joined(torch.autograd.Function):
    """The value as it is; its gradient goes back to it, and none to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004  the anchor is there to need a gradient
        ctx.needed = value.requires_grad
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient if ctx.needed else None
