"""The autocast context of the run for code that has no Accelerator at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from acc_plugins.options.kwargs import AutocastKwargs
from acc_trainer.state import AcceleratorState, is_initialized

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """`torch.autocast` in the precision of the run with `native_amp`, else nothing; for "no", in the low format that torch prefers there.

    Raises `ValueError` where no Accelerator was built.
    """
    if not is_initialized():
        raise ValueError("the precision of the run is not known yet: build an Accelerator() first")
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, dtype=_DTYPES.get(state.mixed_precision), **options)
