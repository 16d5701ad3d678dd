"""What an Accelerator exchanges between the processes: tensors, what metrics need, and the flag that one process raises for all."""

from __future__ import annotations

from typing import Any

import torch

import acc_ops  # lazy
from acc_trainer.rooms import metrics
from acc_trainer.views import Views


class Exchanges(Views):
    """Every process makes these calls alike, except `set_trigger`."""

    flag_tensor: torch.Tensor | None

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes joined along the first dimension, in nested structures too."""
        return acc_ops.gather(tensor, world=self.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` that counts every sample exactly once; see `metrics`."""
        return metrics.gather_for_metrics(input_data, self.grad_sync, self.world, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes combined element by element: "sum", "mean" or "max"."""
        return acc_ops.reduce(tensor, reduction, scale, world=self.world)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors made as long along `dim` as the longest among the processes."""
        return acc_ops.pad_across_processes(tensor, dim, pad_index, pad_first, world=self.world)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self.flag_tensor = torch.ones(1, dtype=torch.int64, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process raised the flag since the last check; every process must ask."""
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.flag_tensor = None
        return bool(acc_ops.reduce(mine, "sum", world=self.world).item())
