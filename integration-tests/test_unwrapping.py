"""unwrap_model gives the user's own module back, whatever was put around it and in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from acc_plugins import TorchDynamoPlugin
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState


class Doubling(ModelHook):
    """Something to see in the output."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


class Tower(nn.Module):
    """Repeated blocks, which regional compilation looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", ["no", "whole", "regions"])
@pytest.mark.parametrize("hooked", ["never", "before", "after"])
def test_unwrapping_gives_the_original(mixed_precision: str, compiled: str, hooked: str) -> None:
    plugin = TorchDynamoPlugin(
        backend="no" if compiled == "no" else "eager", use_regional_compilation=compiled == "regions"
    )
    accelerator = Accelerator(mixed_precision=mixed_precision, dynamo_plugin=plugin)
    own, x = Tower(), torch.ones(1, 2)
    plain, forward = own(x), own.forward
    if hooked == "before":
        add_hook_to_module(own, Doubling())
    prepared = accelerator.prepare(own)
    if hooked == "after":
        add_hook_to_module(prepared, Doubling())
    seen = prepared(x)
    assert seen.dtype is torch.float32
    torch.testing.assert_close(seen, plain if hooked == "never" else plain * 2, rtol=0.03, atol=0.03)

    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is own
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False) is own
    assert accelerator.unwrap_model(own) is own  # nothing is left to take off
    remove_hook_from_module(own)
    accelerator.unwrap_model(own, keep_fp32_wrapper=False)  # takes off what lay under a hook of later
    assert type(own) is Tower
    assert own.forward == forward
    assert torch.equal(own(x), plain)
