"""The autocast context of the run."""

from __future__ import annotations

import pytest
import torch

from acc_plugins.options.kwargs import AutocastKwargs
from acc_trainer import Accelerator, get_mixed_precision_context_manager


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("no", torch.get_autocast_dtype("cpu"))],
)
def test_it_computes_as_the_run_does(mixed_precision, dtype):
    Accelerator(mixed_precision=mixed_precision)
    layer, x = torch.nn.Linear(1, 1), torch.ones(1, 1)
    with get_mixed_precision_context_manager(native_amp=True):
        assert layer(x).dtype is dtype
    with get_mixed_precision_context_manager():
        assert layer(x).dtype is torch.float32
    with get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False)):
        assert layer(x).dtype is torch.float32


@pytest.mark.parametrize("native_amp", [True, False])
def test_without_an_accelerator_there_is_no_precision_to_ask_for(native_amp):
    with pytest.raises(ValueError, match=r"build an Accelerator\(\) first"):
        get_mixed_precision_context_manager(native_amp)
