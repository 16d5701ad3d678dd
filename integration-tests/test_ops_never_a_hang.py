"""Ranks that disagree, leave or stay away: an error on all others, which says what they waited for and who was missing.

No test measures time: what takes too long ends by a timeout, with another text than the one that is asked for.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acc_ops.collectives import barrier, broadcast, gather, pad_across_processes, reduce
from acc_ops.comm import TorchComm
from acc_ops.object_collectives import broadcast_object_list, gather_object, scatter
from acc_ops.processes import get_free_port
from acc_ops.testing import run_processes
from acc_ops.world import World, current_world

one, two = torch.ones(2, 3), torch.ones(2, 4)

# what is tried: what rank 0 does, what every other rank does, what the error says on all of them
MISMATCHES: dict[str, tuple[Callable[[World], Any], Callable[[World], Any], str]] = {
    "shape": (
        lambda w: gather({"a": [one]}, w),
        lambda w: gather({"a": [two]}, w),
        r"batch\['a'\]\[0\]: rank 0 float32 \(2, 3\), rank 1 float32 \(2, 4\)",
    ),
    "dtype": (
        lambda w: reduce(one, "sum", world=w),
        lambda w: reduce(one.double(), "sum", world=w),
        r"tensor: rank 0 float32 \(2, 3\), rank 1 float64 \(2, 3\)",
    ),
    "structure": (
        lambda w: gather([one, one], w),
        lambda w: gather((one, one), w),
        "batch: rank 0 list of 2, rank 1 tuple of 2",
    ),
    "count": (
        lambda w: gather([one], w),
        lambda w: gather([one] * 2, w),
        "batch: rank 0 list of 1, rank 1 list of 2",
    ),
    "key names": (
        lambda w: gather({"x": one}, w),
        lambda w: gather({"y": one}, w),
        "batch: rank 0 dict with 'x', rank 1 dict with 'y'",
    ),
    "operation": (
        lambda w: gather(one, w),
        lambda w: broadcast(one, world=w),
        "operation: rank 0 gather, rank 1 broadcast",
    ),
    "barrier": (
        barrier,
        lambda w: gather_object([3], w),
        "operation: rank 0 barrier, rank 1 gather_object",
    ),
    "reduction": (
        lambda w: reduce(one, "sum", world=w),
        lambda w: reduce(one, "max", world=w),
        r"operation: rank 0 reduce\('sum'\), rank 1 reduce\('max'\)",
    ),
    "root": (
        lambda w: broadcast(one.clone(), 0, w),
        lambda w: broadcast(one.clone(), 1, w),
        "root: rank 0 has 0, rank 1 has 1",
    ),
    "items": (
        lambda w: broadcast_object_list([1], world=w),
        lambda w: broadcast_object_list([1, 2], world=w),
        "object_list: rank 0 has 1 items, rank 1 has 2 items",
    ),
    "argument": (
        lambda w: pad_across_processes(one, dim=0, world=w),
        lambda w: pad_across_processes(one, dim=1, world=w),
        "dim: rank 0 has 0, rank 1 has 1",
    ),
    "one cannot": (
        lambda w: gather(["text"], w),
        lambda w: gather([one], w),
        r"operation: rank 0 cannot take part: TypeError.*'text'.*, rank 1 gather",
    ),
    "one cannot pickle": (
        lambda w: gather_object([threading.Lock()], w),
        lambda w: gather_object([1], w),
        "operation: rank 0 cannot take part: TypeError.*lock.*, rank 1 gather_object",
    ),
    "wrong number of parts": (
        lambda w: scatter([1], 0, w),
        lambda w: scatter(None, 0, w),
        "^rank 0 has to give one part for each of the",
    ),
}


def _world_of(group: dist.ProcessGroup | None, *, warn_after_s: float | None = None) -> World:
    comm = TorchComm(group, warn_after_s=warn_after_s)
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=comm.rank,
        local_size=comm.size,
        device=torch.device("cpu"),
        comm=comm,
    )


def _disagree(world: World) -> dict[str, list[Any]]:
    """For each mismatch the error on this rank, and what a gather right after it gives."""
    said: dict[str, list[Any]] = {}
    for name, (first, others, _) in MISMATCHES.items():
        try:
            (first if world.rank == 0 else others)(world)
        except Exception as error:  # noqa: BLE001 - which one it is, is what is tested
            said[name] = [type(error).__name__, str(error)]
        said.setdefault(name, ["nothing was raised", ""]).append(
            gather(torch.tensor(world.rank), world).tolist()
        )
    return said


def _check(said: list[dict[str, list[Any]]]) -> None:
    for name, (_, _, expected) in MISMATCHES.items():
        for of_rank in said:
            kind, text, after = of_rank[name]
            wrong = "ValueError" if name == "wrong number of parts" else "MismatchError"
            assert kind == wrong, (name, kind, text)
            assert re.search(expected, text), (name, text)
            assert [kind, text, after] == said[0][name]
            assert after == list(range(len(said)))


def _disagree_in_the_whole_group() -> dict[str, list[Any]]:
    return _disagree(current_world())


def test_two_processes_that_disagree_get_the_same_error_and_can_go_on() -> None:
    _check(run_processes(2, _disagree_in_the_whole_group, timeout_s=60))


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _in_parts() -> dict[str, Any]:
    """Three processes: ranks 1 and 2 disagree in a group of their own; then rank 1 waits in DDP for rank 2, which waits for rank 1."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    all_three = dist.new_group([0, 1, 2], timeout=timedelta(seconds=4))
    told: dict[str, Any] = {}
    if rank:
        told["mismatch"] = _disagree(_world_of(pair))
        model = DistributedDataParallel(nn.Linear(1, 1), process_group=pair)
    heard = _Heard()
    logging.getLogger("acc_ops").addHandler(heard)
    world = _world_of(all_three, warn_after_s=2)
    dist.barrier()  # so that all waits begin together
    gather(torch.ones(1), world)
    try:
        if rank == 1:
            model(torch.ones(1, 1)).sum().backward()
        else:
            gather({"a": torch.ones(1)}, world)
    except RuntimeError as error:
        told["error"] = [type(error).__name__, str(error)]
    told["warnings"] = heard.texts
    if rank == 2:
        dist.all_reduce(torch.ones(2), group=pair)  # lets rank 1 go
    return told


def test_ranks_of_a_part_are_named_as_such_and_one_that_waits_elsewhere_is_shown() -> None:
    first, second, third = run_processes(3, _in_parts, timeout_s=60)
    _check([second["mismatch"], third["mismatch"]])
    assert "error" not in second, second
    assert second["warnings"] == []
    for rank, other, told in ((0, 2, first), (2, 0, third)):
        here = rf"gather \(call 2, .*{Path(__file__).name}:\d+\)"
        missing = rf"missing: rank 1, which has made 1 call, the last all_gather, and is at .*{Path(__file__).name}:\d+ in backward"
        too = f"waiting, too: rank {other}"
        (warning,) = told["warnings"]
        assert re.fullmatch(rf"rank {rank} has waited [23] s in {here}; {missing}; {too}", warning), warning
        kind, text = told["error"]
        assert kind == "CommError"
        assert re.search(rf"rank [02] waited \d+ s in {here} in vain; {missing}", text), text


WAYS = {
    3: "which ended",
    4: "whose process has ended",
    5: "whose process has ended",
    6: "which ended with KeyError: 'lost'",
    7: r"which called leave_world\(\) at .*departures.py:\d+",
    8: "whose process has ended",  # but its connections have not
    0: "whose process has ended",  # with the store that it kept
}


def _name(rank: int, outside: int) -> str:
    return f"rank {rank}" if rank == outside else f"rank {rank} (global {outside})"


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_rank_that_left_is_named_however_it_left_and_a_wait_can_be_interrupted() -> None:
    script = Path(__file__).with_name("departures.py")
    command = [sys.executable, str(script), str(get_free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = {(staying, leaving): rest for staying, leaving, *rest in map(json.loads, done.stdout.splitlines())}
    assert told.pop((2, 9)) == ["interrupted"], done.stderr
    assert set(told) == {(staying, leaving) for staying in (1, 2) for leaving in WAYS}, done.stderr
    for (staying, leaving), (before, *errors) in told.items():
        ranks = sorted((1, 2, leaving))
        assert before == ranks
        assert len(errors) == 1, (staying, leaving)
        me, gone = (_name(ranks.index(rank), rank) for rank in (staying, leaving))
        said = rf"{re.escape(me)} waits in gather \(call 2, .*departures.py:\d+\) for {re.escape(gone)}, {WAYS[leaving]}"
        assert re.fullmatch(said, errors[0]), errors[0]
