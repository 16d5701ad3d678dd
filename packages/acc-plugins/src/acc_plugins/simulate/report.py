"""What a simulation found, as figures, a table, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from acc_ops.shown_bytes import convert_bytes
from acc_plugins.simulate.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One training step of rank 0 in a world of `world_size`: bytes that live on a rank, and bytes that it exchanges.

    `weights`, `buffers`, `gradients`, `buckets` and `optimizer` are what the rank keeps; `activations` what autograd keeps between forward and backward;
    `peak` the most that lives at one time in the step, gathered parameters and temporary values included. What a real allocator adds
    (rounding, fragments, a device's own context, communication buffers of the backend) is not in it.
    """

    world_size: int
    axes: Mapping[str, int]
    parameters: int  # elements of the whole model, tied ones once
    weights: int
    buffers: int
    gradients: int
    buckets: int  # in which DistributedDataParallel exchanges gradients: as much again
    optimizer: int
    activations: int
    peak: int
    recompute: str
    traffic: tuple[Traffic, ...] = field(default=())

    @property
    def kept(self) -> int:
        """Bytes between two steps: weights, buffers, gradients with their buckets, and optimizer state."""
        return self.weights + self.buffers + self.gradients + self.buckets + self.optimizer

    def sent(self, axis: str | None = None) -> int:
        """Bytes that a rank sends per step along `axis`, or along all. What goes over several axes at once is counted under the joined one, as torch
        names it (`dp_shard_cp`). KeyError for an axis that is neither of the mesh nor in `traffic`."""
        known = [*dict.fromkeys([*self.axes, *(one.axis for one in self.traffic)])]
        if axis is not None and axis not in known:
            raise KeyError(
                f"there is no axis {axis!r}: this world has {', '.join(known) or 'one process, and none'}"
            )
        return sum(one.sent for one in self.traffic if axis in (None, one.axis))

    def to_json(self) -> str:
        """All figures, in bytes, as JSON text."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items()) or "one process"
        rows = [
            ("weights", self.weights),
            ("buffers", self.buffers),
            ("gradients", self.gradients),
            ("gradient buckets", self.buckets),
            ("optimizer", self.optimizer),
            (f"activations (recompute: {self.recompute})", self.activations),
            ("peak in a step", self.peak),
        ]
        lines = [f"{self.world_size} ranks ({axes}), {self.parameters:,} parameters", "", "bytes on a rank"]
        lines += [f"  {name:<34}{convert_bytes(size):>12}" for name, size in rows if size]
        if self.traffic:
            lines += ["", f"{'communication of a step':<24}{'calls':>8}{'payload':>14}{'sent by a rank':>18}"]
            lines += [
                f"  {f'{one.axis} {one.kind}':<22}{one.calls:>8}{convert_bytes(one.payload):>14}{convert_bytes(one.sent):>18}"
                for one in self.traffic
            ]
        return "\n".join(lines)
