"""Gathering a nested structure on two gloo ranks: ours (verified, coalesced) against one collective per tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import Series, report

from acc_ops import gather, join_world
from acc_ops.testing import run_processes

ROUNDS = 40


def main() -> None:
    figures = run_processes(2, worker)[0]
    for case, (raw, ours, collectives) in figures.items():
        series = {
            "one a tensor": Series(name="raw", values=raw),
            "acc_ops.gather": Series(name="ours", values=ours),
        }
        report(
            f"{case}: CPU time, {collectives} collectives a call by ours",
            series,
            "one a tensor",
            {},
            unit="us",
        )


def worker() -> dict[str, tuple[list[float], list[float], int]]:
    join_world(cpu=True)
    generator = torch.Generator().manual_seed(0)
    cases = {
        "nested, 200 tensors of 2 shapes": {
            f"layer{i}": [torch.randn(4, generator=generator), torch.randn(2, 3, generator=generator)]
            for i in range(100)
        },
        "200 tensors of 200 shapes": {str(i): torch.randn(i + 1, generator=generator) for i in range(200)},
        "one small tensor": torch.randn(8, generator=generator),
        "one tensor of 4 MB": torch.randn(1 << 20, generator=generator),
    }
    result = {}
    for name, data in cases.items():
        leaves = _leaves(data)
        raw: list[float] = []
        ours: list[float] = []
        for i in range(ROUNDS + 3):
            pair = [
                (raw, lambda leaves=leaves: [_plain(x) for x in leaves]),
                (ours, lambda data=data: gather(data)),
            ]
            for series, call in pair if i % 2 else pair[::-1]:
                figure = _cpu(call)
                if i >= 3:
                    series.append(figure)
        result[name] = (raw, ours, _count(lambda data=data: gather(data)))
    return result


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def _leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    values = data.values() if isinstance(data, dict) else data
    return [leaf for value in values for leaf in _leaves(value)]


def _cpu(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.process_time()
    call()
    return time.process_time() - start


def _count(call: Callable[[], object]) -> int:
    """How many collectives a call makes, by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(1 for event in profile.events() if event.name.startswith("gloo:"))


if __name__ == "__main__":
    main()
