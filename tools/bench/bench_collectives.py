"""Gathering on two gloo ranks: ours, verified, against hand-written gathers of one collective per dtype that check nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import Series, report
from torch import Tensor

from acc_ops import gather, join_world
from acc_ops.testing import run_processes
from acc_ops.tree import flatten, unflatten

ROUNDS = 40
WARMUP = 3
SLICED, SPLIT, OURS = "by hand, sliced", "by hand, split", "acc_ops.gather"
# The goals are ratios to the gather that slices; the one that splits is the least work we know of.
CASES: dict[str, tuple[Callable[[], Any], int, float]] = {  # data, calls a figure, goal
    "nested, 200 tensors of 2 shapes": (
        lambda: {f"layer{i}": [torch.randn(4), torch.randn(2, 3)] for i in range(100)},
        5,
        0.7,
    ),
    "200 tensors of 200 shapes": (
        lambda: {str(i): torch.randn(2, i // 2 + 1 + i % 2 * 100) for i in range(200)},
        5,
        1.0,
    ),
    "one small tensor": (lambda: torch.randn(8), 30, 1.2),
    "one tensor of 4 MB": (lambda: torch.randn(1 << 20), 3, 1.05),
}


def main() -> None:
    figures = run_processes(2, worker)
    for case, (_, _, goal) in CASES.items():
        series = {
            name: Series(name=name, values=[value for rank in figures for value in rank[case][0][name]])
            for name in (SPLIT, SLICED, OURS)
        }
        report(
            f"{case}: CPU time of a call; {figures[0][case][1]} collectives by ours", series, SPLIT, {}, "us"
        )
        ratio = series[OURS].over(series[SLICED])
        print(f"  ours x {SLICED}: {ratio:.3f} (goal {goal:g}){' MISSED' if ratio > goal else ''}")


def worker() -> dict[str, tuple[dict[str, list[float]], int]]:
    join_world(cpu=True)
    torch.manual_seed(0)
    return {case: _measure(make(), calls) for case, (make, calls, _) in CASES.items()}


def _measure(data: Any, calls: int) -> tuple[dict[str, list[float]], int]:
    contenders: dict[str, Callable[[], Any]] = {
        SPLIT: lambda: _by_hand(data, _split),
        SLICED: lambda: _by_hand(data, _sliced),
        OURS: lambda: gather(data),
    }
    results = [flatten(call())[0] for call in contenders.values()]
    for others in results[1:]:
        if not all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True)):
            raise SystemExit("the contenders gather different tensors")
    values: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(ROUNDS + WARMUP):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            figure = _cpu(contenders[name], calls)
            if i >= WARMUP:
                values[name].append(figure)
    return values, _count(contenders[OURS])


def _by_hand(data: Any, take_apart: Callable[[Tensor, list[Tensor]], list[Tensor]]) -> Any:
    leaves, structure = flatten(data)
    groups: dict[torch.dtype, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(index)
    gathered = list(leaves)
    for indices in groups.values():
        members = [leaves[i] for i in indices]
        flat = torch.cat([m.reshape(-1) for m in members]) if len(members) > 1 else members[0].reshape(-1)
        rows = torch.empty(dist.get_world_size() * flat.numel(), dtype=flat.dtype)
        _all_gather(rows, flat)
        for index, leaf in zip(indices, take_apart(rows.view(-1, flat.numel()), members), strict=True):
            gathered[index] = leaf
    return unflatten(structure, gathered)


def _sliced(rows: Tensor, members: list[Tensor]) -> list[Tensor]:
    parts = []
    start = 0
    for member in members:
        part = rows[:, start : start + member.numel()]
        parts.append(part.reshape(-1, *member.shape[1:]))
        start += member.numel()
    return parts


def _split(rows: Tensor, members: list[Tensor]) -> list[Tensor]:
    if len(members) == 1:
        return [rows.view(-1, *members[0].shape[1:])]
    parts: Any = torch.split_with_sizes_copy(rows, [member.numel() for member in members], 1)
    return [part.view(-1, *member.shape[1:]) for part, member in zip(parts, members, strict=True)]


# torch 2.13 renamed it and warns about the old name
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _cpu(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    time.sleep(0.001)  # until gloo's threads have let go of the barrier
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls


def _count(call: Callable[[], object]) -> int:
    """How many collectives a call makes, by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(1 for event in profile.events() if event.name.startswith("gloo:"))


if __name__ == "__main__":
    main()
