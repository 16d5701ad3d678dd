"""Every test starts without an Accelerator, in a world of its own."""

from __future__ import annotations

import pytest

from acc_ops.testing import use_test_profile
from acc_ops.world import leave_world
from acc_trainer.gradient_state import GradientState
from acc_trainer.state import AcceleratorState

use_test_profile()


def forget_everything() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    leave_world()


@pytest.fixture(autouse=True)
def fresh_run(monkeypatch: pytest.MonkeyPatch):
    """No Accelerator before, none after, and always the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_everything()
    yield
    forget_everything()
