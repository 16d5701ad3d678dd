"""Budgets under which the fullest of several devices is as empty as can be. Imports no torch."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from acc_bigmodel.atoms import Atoms


def balanced_loads(atoms: Atoms, budgets: Sequence[int], low_zero: bool = False) -> list[int] | None:
    """The bytes that each device should take of atoms in order; None when they do not fit on these devices.

    The fullest device is as empty as a split into runs allows, and under that limit the loads are even. `low_zero`
    first leaves on device 0 only what the others cannot hold. Exact, by bisection: n + devices * log(n) * log(bytes).
    """
    ends = [0, *itertools.accumulate(atoms.nbytes)]
    split = Runs(ends, list(budgets))
    if not split.fits(0, 0, max(budgets, default=0)):
        return None
    start = 0
    loads: list[int] = []
    if low_zero and len(budgets) > 1:
        start = split.shortest_first()
        loads.append(ends[start])
    limit = split.least_limit(start, len(loads))
    for device in range(len(loads), len(budgets)):
        stop = split.even_end(start, device, limit)
        loads.append(ends[stop] - ends[start])
        start = stop
    return loads


def next_bytes(atoms: Atoms, load: int) -> int:
    """The bytes of the atom that comes after the first `load` bytes; 0 at the end."""
    for nbytes in atoms.nbytes:
        if load <= 0 and nbytes:
            return nbytes
        load -= nbytes
    return 0


class Runs:
    """Runs of pieces over devices: `ends[i]` are the bytes of the first i pieces."""

    def __init__(self, ends: list[int], budgets: list[int]) -> None:
        self.ends, self.budgets, self.count = ends, budgets, len(ends) - 1

    def reach(self, start: int, room: int) -> int:
        """The end of the longest run from `start` within `room` bytes."""
        return bisect_right(self.ends, self.ends[start] + room) - 1

    def fits(self, start: int, device: int, limit: int) -> bool:
        """Whether the atoms from `start` fit on the devices from `device`, none fuller than `limit`."""
        for budget in self.budgets[device:]:
            start = self.reach(start, min(budget, limit))
        return start >= self.count

    def least_limit(self, start: int, device: int) -> int:
        """The least limit under which the atoms from `start` fit on the devices from `device`."""
        low, high = 0, max(self.budgets[device:], default=0)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(start, device, middle) else (middle + 1, high)
        return low

    def shortest_first(self) -> int:
        """The least number of atoms on device 0 with which the other devices can hold the rest."""
        low, high = 0, self.reach(0, self.budgets[0])
        full = max(self.budgets)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(middle, 1, full) else (middle + 1, high)
        return low

    def even_end(self, start: int, device: int, limit: int) -> int:
        """Where the run of `device` should end: near an even share, within `limit`, leaving no more than fits."""
        furthest = self.reach(start, min(self.budgets[device], limit))
        remaining = sum(1 for budget in self.budgets[device:] if budget)
        if device == len(self.budgets) - 1 or remaining == 0:
            return furthest
        share = (self.ends[self.count] - self.ends[start]) / remaining
        before = max(start, bisect_right(self.ends, self.ends[start] + share) - 1)
        near = sorted(
            (stop for stop in (before, before + 1) if stop <= furthest),
            key=lambda stop: abs(self.ends[stop] - self.ends[start] - share),
        )
        return next((stop for stop in near if self.fits(stop, device + 1, limit)), furthest)
