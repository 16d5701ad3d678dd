"""SwanLab."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import is_swanlab_available
from acc_trainer.tracking.run_like import RunTracker
from acc_trainer.tracking.tracker import on_main_process


class SwanLabTracker(RunTracker):
    """A run in the project `run_name`; keyword arguments go to `swanlab.init`. Raises `ImportError` without swanlab."""

    name = "swanlab"
    library_available = staticmethod(is_swanlab_available)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Everything that the run's `log` takes; tensors of one element as numbers, strings as SwanLab's texts."""
        text = self.library.Text
        super().log(
            {key: text(value) if isinstance(value, str) else value for key, value in values.items()},
            step,
            **kwargs,
        )
