"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import is_wandb_available
from acc_trainer.tracking.run_like import TableRunTracker
from acc_trainer.tracking.tracker import on_main_process
from acc_trainer.tracking.values import plain


class WandBTracker(TableRunTracker):
    """A run in the project `run_name`; keyword arguments go to `wandb.init`. Raises `ImportError` without wandb."""

    name = "wandb"
    library_available = staticmethod(is_wandb_available)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as the run's config, over those of a resumed run."""
        self.run.config.update(plain(values), allow_val_change=True)
