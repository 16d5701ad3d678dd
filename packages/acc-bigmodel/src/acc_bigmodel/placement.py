"""Which tensor goes where: a plan made from names and bytes alone. Imports no torch.

[Note: how a plan is made]
Atoms (see `atoms.py`) are packed in model order onto the devices in the order of their budgets: each device takes them
until one does not fit any more and passes the rest on, so that data crosses from one device to the next once. Atoms that
are too large for a whole device are passed over: it takes the smaller ones behind them.
What ends on a device that does not compute is streamed to the `main` device in every forward, and needs room there for its
largest atom. That room is searched from nothing upwards: reserving more never shrinks what is streamed, so the first
reserve that is large enough for what it leads to is the least one, and the plan the best contiguous one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from acc_bigmodel.atoms import Atoms, collapse, group_atoms
from acc_bigmodel.text import aligned, in_units

Device = int | str

CPU, DISK = "cpu", "disk"


class PlacementError(ValueError):
    """No plan keeps to the budgets; the message says what was needed, what there was, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a device took no more: the first atom that it passed on, and the bytes that were left for it."""

    atom: str
    nbytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where every tensor of a model is, and why.

    `atoms` are in model order and `homes` are their devices. `budgets` are in bytes, None for no limit. `main` is the
    device that computes what is on a device that cannot; `reserve_bytes` of its budget are kept free to stream that.
    """

    atoms: Atoms
    homes: Sequence[Device]
    budgets: Mapping[Device, int | None]
    main: Device
    reserve_bytes: int = 0
    refusals: Mapping[Device, Refusal]
    notes: tuple[str, ...] = ()
    is_given: bool = False  # the homes come from a device map, not from a plan

    @functools.cached_property
    def devices(self) -> dict[str, Device]:
        """The device of every tensor, by name."""
        return {
            name: home for number, home in enumerate(self.homes) for name in self.atoms.tensors_of(number)
        }

    @functools.cached_property
    def used_bytes(self) -> dict[Device, int]:
        """The bytes on every device, without the reserve."""
        used = dict.fromkeys(self.budgets, 0)
        for nbytes, home in zip(self.atoms.nbytes, self.homes, strict=True):
            used[home] += nbytes
        return used

    def streams(self, device: Device) -> bool:
        """Whether what is on `device` has to be brought to the main device in every forward."""
        return device == DISK or (device == CPU and self.main != CPU)

    def numbers_on(self, device: Device) -> list[int]:
        """The numbers of the atoms on a device."""
        return self._numbers_by_home.get(device, [])

    def streamed_bytes(self, number: int) -> int:
        """The bytes of an atom that are brought to the main device where it is streamed."""
        return self.atoms.nbytes[number] - self.atoms.staying_bytes[number]

    def device_map(self, clean: bool = True) -> dict[str, Device]:
        """The plan as a device map, in the order of the devices; `clean` names a module instead of all that is in it."""
        device_map = {
            key: device
            for device in self.budgets
            for number in self.numbers_on(device)
            for key in self.atoms.keys(number)
        }
        return collapse(device_map) if clean else device_map

    def why(self, name: str) -> str:
        """One sentence: where the tensor or module `name` is, and why. Raises KeyError for an unknown name."""
        for number, home in enumerate(self.homes):
            if name in self.atoms.keys(number) or name in self.atoms.tensors_of(number):
                return f"{name} is on {home}: {self._reason(number, home)}"
        raise KeyError(f"{name!r} is neither a tensor nor a module of this placement")

    def table(self) -> str:
        """The plan as text: a line for every device, then the reserve and what else there is to say."""
        return "\n".join([*aligned(self._rows(), right=(1, 2, 3, 6)), *self._remarks()]) + "\n"

    def svg(self, title: str = "") -> str:
        """The plan as an SVG picture: one bar for every device, filled in model order."""
        from acc_bigmodel.picture import draw  # noqa: PLC0415 - xml, and drawing, for who wants a picture

        return draw(self, title)

    @functools.cached_property
    def _numbers_by_home(self) -> dict[Device, list[int]]:
        numbers: dict[Device, list[int]] = {}
        for number, home in enumerate(self.homes):
            numbers.setdefault(home, []).append(number)
        return numbers

    def _reason(self, number: int, home: Device) -> str:
        if self.is_given:
            return f"the device map says so; it takes {in_units(self.atoms.nbytes[number])} there"
        refused = [
            f"{device} had {in_units(refusal.free_bytes)} left for {refusal.atom} ({in_units(refusal.nbytes)})"
            for device, refusal in self.refusals.items()
            if device != home and list(self.budgets).index(device) < list(self.budgets).index(home)
        ]
        size = in_units(self.atoms.nbytes[number])
        return (
            f"its {size} follow what did not fit before, where {'; '.join(refused)}"
            if refused
            else f"its {size} fit"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("device", "used", "budget", "pieces", "first", "last", "streamed a forward")
        ]
        for device, budget in self.budgets.items():
            mine = self.numbers_on(device)
            streamed = sum(map(self.streamed_bytes, mine)) if self.streams(device) else 0
            rows.append(
                (
                    str(device),
                    in_units(self.used_bytes[device]),
                    "no limit" if budget is None else in_units(budget),
                    str(len(mine)),
                    self.atoms.name(mine[0]) if mine else "-",
                    self.atoms.name(mine[-1]) if mine else "-",
                    in_units(streamed) if streamed else "-",
                )
            )
        return rows

    def _remarks(self) -> list[str]:
        remarks = []
        if self.reserve_bytes:
            remarks.append(
                f"{in_units(self.reserve_bytes)} of {self.main} are kept free for what is streamed there."
            )
        for device, refusal in self.refusals.items():
            remarks.append(
                f"{device} does not take {refusal.atom}, which needs {in_units(refusal.nbytes)} where "
                f"{in_units(refusal.free_bytes)} were left."
            )
        return [*remarks, *self.notes]


def plan(
    sizes: Mapping[str, int],
    budgets: Mapping[Device, int | None],
    *,
    ties: Sequence[Sequence[str]] = (),
    blocks: Collection[str] = (),
    staying: Collection[str] = (),
    reserve: bool = True,
) -> Placement:
    """Place tensors on devices such that what stays on one does not exceed its budget.

    `sizes` are bytes by tensor name, in model order; `budgets` are bytes by device in order of preference, None for no
    limit; devices are indices of accelerators, other device names, "cpu" and "disk". `ties` are groups of names that
    share one tensor, `blocks` the modules that stay whole, `staying` the tensors that are not streamed (buffers).
    `reserve=False` keeps no room for streaming; where the whole budget is too small for it, a note of the plan says so.

    Raises PlacementError (a ValueError) when the budgets cannot hold the model.
    """
    if not budgets:
        raise PlacementError("there is no device to place anything on: give at least one budget")
    for device, budget in budgets.items():
        if budget is not None and budget < 0:
            raise PlacementError(f"the budget of {device} must not be negative, got {budget}")
    atoms = group_atoms(sizes, ties, blocks, staying)
    packing, reserved, notes = _search(atoms, budgets, main_of(budgets), reserve)
    if packing.left:
        raise PlacementError(_shortage(atoms, budgets, reserve))
    return Placement(
        atoms=atoms,
        homes=[packing.homes[number] for number in range(len(atoms))],
        budgets=dict(budgets),
        main=main_of(budgets),
        reserve_bytes=reserved,
        refusals=packing.refusals,
        notes=notes,
    )


def placement_of_map(
    atoms: Atoms, homes: Sequence[Device], budgets: Mapping[Device, int | None]
) -> Placement:
    """The `Placement` of atoms that a device map has sent to `homes` already, whatever the budgets are."""
    main = main_of(budgets)
    needed = _streaming_bytes(atoms, dict(enumerate(homes)), _streaming(budgets, main))
    over = budgets.get(main)
    notes = [f"Running it needs {in_units(needed)} on {main} for what is streamed there."] if needed else []
    used = sum(size for size, home in zip(atoms.nbytes, homes, strict=True) if home == main)
    if over is not None and used + needed > over:
        notes.append(f"That is {in_units(used + needed - over)} more than the budget of {main}.")
    return Placement(
        atoms=atoms, homes=homes, budgets=budgets, main=main, refusals={}, notes=tuple(notes), is_given=True
    )


def main_of(budgets: Mapping[Device, int | None]) -> Device:
    """The device that computes what is on a device that cannot: the first accelerator with a budget, else the CPU."""
    computing = [device for device in budgets if device not in (CPU, DISK)]
    return next((device for device in computing if budgets[device] != 0), computing[0] if computing else CPU)


@dataclass(kw_only=True)
class _Packing:
    """One attempt: atom number -> device, what no device took, and what was left on each."""

    homes: dict[int, Device]
    left: list[int]
    free: dict[Device, float]
    refusals: dict[Device, Refusal]
    goes_back: bool = False  # a device took atoms from both sides of one that it passed over


def _search(
    atoms: Atoms, budgets: Mapping[Device, int | None], main: Device, reserve: bool
) -> tuple[_Packing, int, tuple[str, ...]]:
    """The packing with the least sufficient reserve on `main`, that reserve, and what to say about it.

    Devices that went on with smaller atoms after one that is too large for them make data go back and forth: this is only
    done where it keeps more off the devices that do not compute.
    """
    found = _least_reserve(atoms, budgets, main, reserve, in_order=False)
    if found[0].goes_back:
        ordered = _least_reserve(atoms, budgets, main, reserve, in_order=True)
        streaming = _streaming(budgets, main)
        if _cost(atoms, ordered, streaming) <= _cost(atoms, found, streaming):
            return ordered
    return found


def _cost(
    atoms: Atoms, found: tuple[_Packing, int, tuple[str, ...]], streaming: Sequence[Device]
) -> tuple[bool, bool, int]:
    packing, _, notes = found
    streamed = sum(atoms.nbytes[number] for number, device in packing.homes.items() if device in streaming)
    return bool(packing.left), bool(notes), streamed


def _least_reserve(
    atoms: Atoms, budgets: Mapping[Device, int | None], main: Device, reserve: bool, in_order: bool
) -> tuple[_Packing, int, tuple[str, ...]]:
    reserved = 0
    streaming = _streaming(budgets, main)
    limit = budgets.get(main)
    while True:
        packing = _pack(atoms, budgets, main, reserved, in_order)
        needed = _streaming_bytes(atoms, packing.homes, streaming) if reserve else 0
        if needed <= reserved:
            return packing, needed, ()  # a smaller reserve may have led to a plan that needs more
        if limit is not None and needed > limit:
            note = (
                f"Streaming needs {in_units(needed)} on {main}, more than its whole budget of {in_units(limit)}: running "
                f"this plan will exceed it. Raise it by {in_units(needed - limit)}, or split larger modules."
            )
            return _pack(atoms, budgets, main, 0, in_order), 0, (note,)
        reserved = needed


def _streaming(budgets: Mapping[Device, int | None], main: Device) -> list[Device]:
    return [device for device in budgets if device == DISK or (device == CPU and main != CPU)]


def _pack(
    atoms: Atoms, budgets: Mapping[Device, int | None], main: Device, reserved: int, in_order: bool
) -> _Packing:
    packing = _Packing(homes={}, left=list(range(len(atoms))), free={}, refusals={})
    for device, budget in budgets.items():
        room = math.inf if budget is None else budget - (reserved if device == main else 0)
        packing.left, packing.free[device] = _fill(atoms, device, max(room, 0), packing, in_order)
    if packing.left:
        _fill_gaps(atoms, packing)
    return packing


def _fill(
    atoms: Atoms, device: Device, room: float, packing: _Packing, in_order: bool
) -> tuple[list[int], float]:
    """Take atoms in order until one does not fit any more; those too large for the whole device are passed over.

    With `in_order` they are passed over only before the first that is taken. Returns the atoms and the room that are left.
    """
    passed: list[int] = []
    whole = room
    passed_since = -1  # how many were passed over when the last one was taken
    for position, number in enumerate(packing.left):
        nbytes = atoms.nbytes[number]
        if nbytes <= room:
            packing.goes_back |= 0 <= passed_since < len(passed)
            passed_since = len(passed)
            packing.homes[number] = device
            room -= nbytes
            continue
        if device not in packing.refusals:
            packing.refusals[device] = Refusal(atom=atoms.name(number), nbytes=nbytes, free_bytes=int(room))
        if nbytes <= whole or (in_order and passed_since >= 0):
            passed.extend(packing.left[position:])
            break
        passed.append(number)
    return passed, room


def _fill_gaps(atoms: Atoms, packing: _Packing) -> None:
    """The devices are full in order: put the rest wherever there is room, largest first."""
    left = []
    for number in sorted(packing.left, key=lambda number: -atoms.nbytes[number]):
        nbytes = atoms.nbytes[number]
        device = next((device for device, room in packing.free.items() if nbytes <= room), None)
        if device is None:
            left.append(number)
        else:
            packing.homes[number] = device
            packing.free[device] -= nbytes
    packing.left = sorted(left)


def _streaming_bytes(atoms: Atoms, homes: Mapping[int, Device], streaming: Sequence[Device]) -> int:
    """What the main device needs for the atoms on devices that do not compute: the largest, and all that stays."""
    largest = staying = 0
    for number, device in homes.items():
        if device in streaming:
            largest = max(largest, atoms.nbytes[number] - atoms.staying_bytes[number])
            staying += atoms.staying_bytes[number]
    return largest + staying


def _shortage(atoms: Atoms, budgets: Mapping[Device, int | None], reserve: bool) -> str:
    raised, extra = _least_raise(atoms, budgets, reserve)
    there = ", ".join(f"{device}: {in_units(budget or 0)}" for device, budget in budgets.items())
    largest = max(range(len(atoms)), key=atoms.nbytes.__getitem__)
    remedy = f"raise the budget of {raised} by {in_units(extra)} ({extra} bytes)"
    return (
        f"the model needs {in_units(sum(atoms.nbytes))} in {len(atoms)} pieces, the largest {atoms.name(largest)} "
        f"with {in_units(atoms.nbytes[largest])}; the budgets are {there}. A change that would do: {remedy}"
        + ("." if DISK in budgets else ", or allow 'disk'.")
    )


def _least_raise(atoms: Atoms, budgets: Mapping[Device, int | None], reserve: bool) -> tuple[Device, int]:
    """A device whose larger budget would hold the model, and the bytes that it lacks. None has no limit.

    The least found by bisection. A smaller one can do, for a larger budget that takes a larger piece may leave less room
    for the rest; only trying every sum of pieces would tell. What is less than all that is missing is never enough.
    """
    given = {device: budget or 0 for device, budget in budgets.items()}

    def fits(device: Device, extra: int) -> bool:
        raised = {**given, device: given[device] + extra}
        return not _search(atoms, raised, main_of(raised), reserve)[0].left

    total = sum(atoms.nbytes)
    missing = max(total - sum(given.values()), 1)
    best, least = list(given)[-1], total  # a device that can hold the whole model will do
    for device in reversed(given):
        if fits(device, missing):
            return device, missing
    for device in reversed(given):  # the last ones are the cheapest
        if not fits(device, least - 1):
            continue
        low, high = missing, least - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(device, middle) else (middle + 1, high)
        best, least = device, low
    return best, least
