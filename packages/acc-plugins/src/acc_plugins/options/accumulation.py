"""How many micro-batches make one step, and when to synchronise in between."""

from __future__ import annotations

from dataclasses import dataclass

from acc_ops.handlers import KwargsHandler
from acc_ops.options import option
from acc_plugins.options.checks import require_at_least, settle


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Gradient accumulation. Raises OptionError (a ValueError) for fewer than one step."""

    num_steps: int | None = option(
        None,
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flag="gradient_accumulation_steps",
        key="gradient_accumulation_steps",
        help="micro-batches whose gradients are added up for one optimizer step",
    )
    adjust_scheduler: bool = option(
        True,
        flag=False,
        help="taken for the sake of old scripts; either way a schedule moves with the steps that are made",
    )
    sync_with_dataloader: bool = option(
        True, flag=False, help="finish the step at the end of a data loader, also with fewer micro-batches"
    )
    sync_each_batch: bool = option(
        False,
        flag=False,
        help="exchange gradients at every micro-batch: less memory with sharded models, more traffic",
    )
    average_short_window: bool = option(
        False,
        flag=False,
        help="divide a last window with fewer micro-batches by their number, and not by num_steps: the mean, as plain torch has it",
    )

    def __post_init__(self) -> None:
        settle(self)
        require_at_least(self, "num_steps", 1)
