"""Worlds for tests: a process group of one rank, and a process that forgets its world afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from acc_ops.fake_accelerator import FakeAcceleratorUnavailable, fake_accelerator
from acc_ops.testing import use_test_profile
from acc_ops.world import leave_world

use_test_profile()

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ops_data.py, ops_checks.py and fake_xla.py, which several test files share
pytest.register_assert_rewrite("ops_checks", "ops_data")

from fake_xla import FakeXla  # noqa: E402 - it is beside this file

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_world_left_behind() -> Iterator[None]:
    yield
    leave_world()


@pytest.fixture(scope="session")
def needs_fake_accelerator() -> None:
    """Skips the test, with the reason, where there can be no fake accelerator."""
    try:
        with fake_accelerator():
            pass
    except FakeAcceleratorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def gloo_group(tmp_path: Path) -> Iterator[None]:
    """A process group that a user's script made, with this process as its only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a script that was started by hand."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_xla(monkeypatch: pytest.MonkeyPatch) -> FakeXla:
    """A torch_xla that is imported, whose ranks are the threads of `run_threads`."""
    made = FakeXla()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
