"""Counts what a step sends: every collective that torch runs while the counter is on, by axis of the mesh and by kind.

[Note: bytes sent] `payload` is the size of the whole tensor that a collective makes or combines. What one rank of n sends for it, with the ring
algorithms that NCCL and gloo use (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009):
(n - 1) / n of the payload for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce; a broadcast passes it on once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from acc_plugins.simulate.memory import tensors_in

_SHARE = {  # part of the payload that one rank sends, in units of (n - 1) / n
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
    "all_to_all": 1,
}
_WORDS = {  # a part of torch's name -> the kind
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "send": "send",
}
_SPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one `kind` along one `axis` in one step of one rank: how many `calls`, of how many bytes in all (`payload`), of which this
    rank sends `sent` (see the note above)."""

    axis: str
    kind: str
    calls: int
    payload: int
    sent: int


class TrafficCounter(TorchDispatchMode):
    """Around a step: `traffic()` is what its collectives moved. `axes` maps the names of process groups to axes; other groups keep their names."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self._found: dict[tuple[str, str], tuple[int, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its own dispatch comes first, and then here with what it really sends
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in _SPACES and (kind := _kind_of(func)):
            self._count(func, kind, args, kwargs or {}, result)
        return result

    def traffic(self) -> tuple[Traffic, ...]:
        """What was counted, by axis, then kind."""
        return tuple(
            Traffic(axis=axis, kind=kind, calls=calls, payload=payload, sent=sent)
            for (axis, kind), (calls, payload, sent) in sorted(self._found.items())
        )

    def _count(self, func: Any, kind: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        group = _group_of(given)
        if group is None or group.size() == 1:  # nobody to send to
            return
        inputs = [value for name, value in given.items() if not name.startswith("out")]
        outputs = [value for name, value in given.items() if name.startswith("out")] or result
        payload = _bytes(outputs if kind in ("all_gather", "gather") else inputs)
        self.add(self._axes.get(group.group_name, group.group_name), kind, payload, group.size())

    def add(self, axis: str, kind: str, payload: int, size: int, calls: int = 1) -> None:
        """Count one (or `calls`) of `payload` bytes in all among `size` ranks that does not pass through here."""
        before = self._found.get((axis, kind), (0, 0, 0))
        sent = payload * _SHARE[kind] * (size - 1) // size if kind in _SHARE else payload
        self._found[axis, kind] = (before[0] + calls, before[1] + payload, before[2] + sent)


def _kind_of(func: Any) -> str | None:
    name = func.overloadpacket.__name__
    return next((kind for word, kind in _WORDS.items() if word in name), None)


def _group_of(given: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """The process group, which some operations take as an object and some by name."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    named: Any = group
    return dist.distributed_c10d._resolve_process_group(named) if isinstance(group, str) else group


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))
