"""A process group of one, for engines that ask for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from acc_ops.parting import destroy_group
from acc_ops.world import World, current_world


@pytest.fixture
def alone() -> Iterator[World]:
    """The world of a process that is alone in a group of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield current_world()
    finally:
        destroy_group()
