"""torch's profiler for a block of a run, with a trace file for each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from acc_ops.collectives import barrier
from acc_ops.world import World
from acc_plugins.options.kwargs import ProfileKwargs


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[Any]:
    """The running profiler; afterwards `output_trace_dir`/profile_RANK.json, when that folder is set."""
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is None:
        return
    try:
        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{world.rank}.json"))
    finally:
        barrier(world)
