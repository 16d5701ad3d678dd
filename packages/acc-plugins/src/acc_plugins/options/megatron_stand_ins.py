"""What stands in a script for a scheduler that Megatron-LM makes."""

from __future__ import annotations

from typing import Any


class MegatronLMDummyScheduler:
    """A learning rate scheduler that Megatron-LM makes; it says how long to train and to warm up where the plugin does not, in steps of all ranks together."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
