"""Interleaved contenders, medians with spread, ratios pair by pair: what every benchmark beside this file uses.

Absolute times mean nothing on a shared machine; ratios of one run do. Every round runs each contender once, starting with another one each time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Series:
    """The figures of one contender, in rounds; seconds unless its benchmark says otherwise."""

    name: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: Series) -> float:
        """Median of the pairwise ratios to another series of the same run."""
        return statistics.median(a / b for a, b in zip(self.values, other.values, strict=True))


def interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[str, Series]:
    """Run every contender `rounds` times in turn; each returns its own figure."""
    names = list(contenders)
    values: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warmup):
            contenders[name]()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            values[name].append(contenders[name]())
    return {name: Series(name=name, values=values[name]) for name in names}


def cpu_seconds(command: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """User and system seconds of a command and its children; it must end with 0."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds one call takes."""
    start = clock()
    function()
    return clock() - start


def report(
    title: str, series: Mapping[str, Series], limit: str, goals: Mapping[str, float], unit: str = "ms"
) -> None:
    """Print a table: median, spread, ratio to the `limit` of the same run, and the goal for that ratio where there is one."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    print(f"\n{title} (n = {len(series[limit].values)})")
    print(f"  {'':28}{'median ' + unit:>12}  {'min .. max':>22}  {'x ' + limit:>14}  goal")
    for name, one in series.items():
        spread = f"{min(one.values) * scale:.3g} .. {max(one.values) * scale:.3g}"
        goal = f"<= {goals[name]:g}" if name in goals else ""
        print(f"  {name:28}{one.median * scale:12.4g}  {spread:>22}  {one.over(series[limit]):14.3f}  {goal}")
