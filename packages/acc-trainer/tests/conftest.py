"""Every test starts without an Accelerator, in a world of its own."""

from __future__ import annotations

import pytest
import torch

from acc_ops.testing import use_test_profile
from acc_ops.world import current_world, leave_world
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


class _Mesh:
    """The part of a DeviceMesh that is asked: two shares of the samples, each of which two ranks have."""

    mesh_dim_names = ("dp_replicate", "tp")
    mesh = torch.arange(4).reshape(2, 2)

    def __getitem__(self, name):
        return self

    def size(self):
        return 2

    def get_local_rank(self, name):
        rank = current_world().rank
        return rank // 2 if name.startswith("dp") else rank % 2


@pytest.fixture(scope="session")
def mesh():
    return _Mesh()
