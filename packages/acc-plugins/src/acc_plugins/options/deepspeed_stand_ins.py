"""What stands in a script for an optimizer or a scheduler that DeepSpeed makes, and DeepSpeed's own optimizer for one of torch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from acc_ops.optional import require

if TYPE_CHECKING:
    import torch

_FAMILY = re.compile(r"(?:Paged)?(Adam|AdamW|Adagrad|Lion)(?:8bit|32bit)?")
_LOST = {  # setting of a group that DeepSpeed's CPU optimizers have not -> its value that changes nothing
    "amsgrad": False,
    "maximize": False,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
}


class DummyOptim:
    """An optimizer that the DeepSpeed configuration defines; it holds the parameters and fills the "auto" values."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """A learning rate scheduler that the DeepSpeed configuration defines, or that `lr_scheduler_callable(optimizer)` builds once there is an optimizer."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's optimizer for states in CPU memory that computes what `optimizer` does, with its groups and their settings.

    Adam, AdamW, Adagrad and Lion, by the name of the class or of one it derives from; 8 bit and paged ones count as theirs. Raises ValueError for
    another optimizer and for a setting that DeepSpeed's has not, ImportError without DeepSpeed.
    """
    family = _family_of(optimizer)
    for group in optimizer.param_groups:
        for name, harmless in _LOST.items():
            if group.get(name, harmless) != harmless:
                raise ValueError(
                    f"{name}={group[name]!r} of {type(optimizer).__name__} has no equal in DeepSpeed's CPU optimizer: leave it out, or do not "
                    "offload the optimizer"
                )
    settings = {
        name: optimizer.defaults[name]
        for name in ("lr", "betas", "eps", "weight_decay")
        if name in optimizer.defaults and not (family == "Lion" and name == "eps")
    }
    purpose = f"offloading {type(optimizer).__name__} to CPU memory"
    if family in ("Adam", "AdamW"):
        adam = require("deepspeed.ops.adam", purpose, extra="acc-plugins[deepspeed]")
        return adam.DeepSpeedCPUAdam(
            optimizer.param_groups, adamw_mode=_decouples(optimizer, family), **settings
        )
    home = require(f"deepspeed.ops.{family.lower()}", purpose, extra="acc-plugins[deepspeed]")
    return getattr(home, f"DeepSpeedCPU{family}")(optimizer.param_groups, **settings)


def _family_of(optimizer: Any) -> str:
    for kind in type(optimizer).__mro__:
        found = _FAMILY.fullmatch(kind.__name__)
        if found:
            return found[1]
    raise ValueError(
        f"DeepSpeed has no CPU optimizer for {type(optimizer).__name__}: use Adam, AdamW, Adagrad or Lion, or do not offload the optimizer"
    )


def _decouples(optimizer: Any, family: str) -> bool:
    """Whether weight decay is AdamW's; torch's Adam can be told to do that, too."""
    return bool(optimizer.defaults.get("decoupled_weight_decay", family == "AdamW"))
