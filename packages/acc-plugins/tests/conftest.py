"""Hypothesis as in all our tests, and a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acc_ops.testing import use_test_profile

use_test_profile()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of one rank: what the ranks of a larger one do with each other is in integration-tests."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from acc_ops.parting import destroy_group

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    destroy_group()
