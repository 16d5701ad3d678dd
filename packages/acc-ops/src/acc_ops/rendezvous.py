"""Where the ranks that a launcher started meet: one address, the store there, and in it one process group after another.

[Note: one prefix for each group] A store may outlive the group that was made with it: torchrun's agent keeps its own, and rank 0 keeps this
one. Where a second group is made with the same keys, its ranks read the addresses of the first one. So the n-th group that a
process makes at a meeting point has the prefix `acc/n`; the ranks, which make them together, count alike.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from acc_ops.ranks import Ranks

DEFAULT_PORT = 29500  # where ranks of one machine meet when the launcher names no port


class WorldError(RuntimeError):
    """This process cannot join the ranks it was started with."""


def make_group(ranks: Ranks, backend: str, options: dict[str, Any]) -> None:
    """Make the default process group of all `ranks`; `options` are those of `init_process_group`.

    Raises WorldError when the ranks cannot meet.
    """
    global _kept
    if not dist.is_available():
        raise WorldError(f"{ranks.size} ranks cannot meet: this torch was built without torch.distributed")
    options = {"backend": backend, "rank": ranks.rank, "world_size": ranks.size, **options}
    if "store" in options:
        url = "the given store"
    else:
        url = options.pop("init_method", None) or _meeting_point(ranks)
    point = (url, options["rank"], options["world_size"], os.getpid())
    try:
        if "store" not in options:
            options["store"] = _next_store(point, options.get("timeout") or dist.default_pg_timeout)
        dist.init_process_group(**options)
    except (RuntimeError, ValueError) as error:  # torch has several for its ways not to meet
        _kept = None
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorldError(
            f"rank {point[1]} of {point[2]} could not meet the others at {url.removeprefix('tcp://')}: {said} ({_REMEDY})"
        ) from error
    _groups_made[point] += 1


_REMEDY = "on every rank MASTER_ADDR and MASTER_PORT must name the machine of rank 0 and one port that is free there, and RANK must be another"
_Point = tuple[str, int, int, int]  # URL, rank, size, process
_groups_made: Counter[_Point] = Counter()
_kept: tuple[_Point, Any] | None = (
    None  # the last store: others may not have left the group before when this rank makes one
)


def _next_store(point: _Point, timeout: timedelta) -> Any:
    global _kept
    url, rank, size, _ = point
    if _kept is None or _kept[0] != point:
        _kept = None
        store, _, _ = next(dist.rendezvous(url, rank, size, timeout=timeout))  # type: ignore[operator, unused-ignore]
        _kept = (point, store)
    store = _kept[1]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"acc/{_groups_made[point]}", store)


def _meeting_point(ranks: Ranks) -> str:
    """Where torchrun's agent already holds the store, torch knows it and starts none."""
    address, port = ranks.main_address, DEFAULT_PORT if ranks.main_port is None else ranks.main_port
    if address is None and ranks.local_size < ranks.size:
        raise WorldError(
            f"{ranks.size} ranks on several machines cannot find each other: "
            "set MASTER_ADDR to the host name of rank 0"
        )
    if not 0 < port < 1 << 16:
        raise WorldError(
            f"MASTER_PORT={port} is no port: set it to one, up to 65535, that is free on rank 0's machine"
        )
    host = address or "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
