"""Leaving a process group."""

from __future__ import annotations

import os
import subprocess
import sys


def test_gloo_is_given_time_to_drop_its_last_tensors_at_exit() -> None:
    code = """
import atexit, torch.distributed as dist
from acc_ops import join_world, parting
paused = []
parting.time = type("Clock", (), {"sleep": paused.append})
join_world(cpu=True, store=dist.HashStore())
assert dist.is_initialized() and paused == []
atexit._run_exitfuncs()
assert paused == [parting._GLOO_PAUSE_S]
"""
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ranks}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
