"""torch's profiler for a block of a run, with trace files for each process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from acc_ops.collectives import barrier
from acc_ops.world import World
from acc_plugins.options.kwargs import ProfileKwargs

logger = logging.getLogger(__name__)


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[Any]:
    """The running profiler. With `output_trace_dir` each finished trace is written there.

    The newest is profile_RANK.json; with a schedule that repeats, those before it are profile_RANK_1.json, profile_RANK_2.json and so on. The handler's own
    `on_trace_ready` is called before that; a trace that it saves itself is left out, since torch saves one only once. After the block the ranks wait for one another, so that all files are there, if files were asked for. An
    exception in the block ends it at once, and what was recorded is still written. Raises `OSError` where a file could not be written, when all ranks are done.
    """
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    traces = _Traces(Path(handler.output_trace_dir), world.rank, handler.on_trace_ready)
    with replace(handler, on_trace_ready=traces.keep).build() as profiler:
        yield profiler
    try:
        traces.check(handler)
    finally:
        if world.size > 1:
            barrier(world)


class _Traces:
    """The trace files of one rank."""

    def __init__(self, folder: Path, rank: int, then: Callable[[Any], Any] | None) -> None:
        self.folder = folder
        self.rank = rank
        self.then = then
        self.count = 0
        self.error: OSError | None = None

    def keep(self, profiler: Any) -> None:
        """A trace is ready: the handler's own function sees it first, since torch saves a trace only once."""
        if self.then is not None:
            self.then(profiler)
        newest = self.folder / f"profile_{self.rank}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.count:
                os.replace(newest, self.folder / f"profile_{self.rank}_{self.count}.json")
            profiler.export_chrome_trace(str(newest))
        except OSError as error:  # the training goes on; `check` raises it after the block
            self.error = error
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            logger.warning(
                "on_trace_ready saved the trace of rank %d itself: %s is left out", self.rank, newest
            )
        self.count += 1

    def check(self, handler: ProfileKwargs) -> None:
        """Raise what could not be written, and say when there was nothing to write."""
        if self.error is not None:
            raise self.error
        if not self.count:
            logger.warning(
                "the profiler recorded no step, so that rank %d wrote no trace: schedule_option=%s needs more calls of profiler.step()",
                self.rank,
                handler.schedule_option,
            )
