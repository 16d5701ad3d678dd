"""Where a model is cut into the stages of a pipeline: an even split by bytes, and the modules at which stages begin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from acc_bigmodel.atoms import Atoms, group_atoms
from acc_bigmodel.balance import Runs
from acc_bigmodel.budget import MaxMemory
from acc_bigmodel.device_map import infer_auto_device_map
from acc_bigmodel.measure import take_inventory
from acc_bigmodel.placement import Device
from acc_ops.arguments import whole_number
from acc_ops.option_fields import closest


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
) -> dict[str, Device]:
    """The stage, 0 to `num_processes` - 1, of every layer: in order, none empty, the fullest with as few bytes as can be.

    Modules of the classes `no_split_module_classes` (default: the model's own `_no_split_modules`) stay whole. Each stage holds
    what it uses, so a shared tensor counts in each. With `max_memory`, or for one process, the map is that of
    `infer_auto_device_map`. Raises ValueError when there are fewer layers than processes.
    """
    processes = whole_number(num_processes, "num_processes")
    whole = no_split_module_classes or getattr(model, "_no_split_modules", None)
    whole = sorted(whole) if isinstance(whole, (set, frozenset)) else whole
    if processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {processes}")
    if processes == 1 or max_memory is not None:
        return infer_auto_device_map(model, max_memory, no_split_module_classes=whole, clean_result=False)
    inventory = take_inventory(model, no_split_module_classes=whole)
    atoms = group_atoms(inventory.sizes, (), inventory.blocks)
    layers = _layers(atoms)
    if len(layers) < processes:
        raise ValueError(
            f"{type(model).__name__} has {len(layers)} layers at which a stage can begin, too few for {processes} processes: "
            "use fewer, or let more modules be split (no_split_module_classes)"
        )
    ends = [0, *itertools.accumulate(sum(atoms.nbytes[number] for number in layer) for layer in layers)]
    starts = even_starts(ends, processes)
    return {
        key: stage
        for stage, (start, stop) in enumerate(itertools.pairwise([*starts, len(layers)]))
        for layer in layers[start:stop]
        for number in layer
        for key in atoms.keys(number)
    }


def even_starts(ends: Sequence[int], runs: int) -> list[int]:
    """Where each of `runs` runs begins, so that the largest is as small as can be, then near even; none is empty.

    `ends[i]` are the bytes of the first i pieces, of which there are at least as many as runs. Exact, by bisection.
    """
    split = Runs(list(ends), [ends[-1]] * runs)
    limit = split.least_limit(0, 0)
    starts = [0]
    for left in range(runs - 1, 0, -1):  # runs after this one
        start = starts[-1]
        furthest = min(split.reach(start, limit), split.count - left)
        share = ends[start] + (ends[-1] - ends[start]) / (left + 1)
        near = sorted(range(start + 1, furthest + 1), key=lambda stop: abs(ends[stop] - share))
        starts.append(
            next((stop for stop in near if split.fits(stop, runs - left, limit)), max(furthest, start + 1))
        )
    return starts


def choose_split_points(
    model: nn.Module,
    split_points: str | Sequence[str],
    processes: int,
    no_split_module_classes: str | Sequence[str] | None,
) -> list[str]:
    """The names of the modules at which the second and later stages begin. Raises ValueError for what cannot be one."""
    if processes == 1:
        return []
    if split_points == "auto":
        device_map = generate_device_map(model, processes, no_split_module_classes)
        first: dict[Device, str] = {}
        for key, stage in device_map.items():
            first.setdefault(stage, key)
        return [first[stage] for stage in range(1, processes)]
    if isinstance(split_points, str):
        raise ValueError(f"split_points must be 'auto' or a list of names of modules, got {split_points!r}")
    modules = dict(model.named_modules())
    for name in split_points:
        if name not in modules or not name:
            near = closest(name, modules)
            raise ValueError(
                f"split_points names {name!r}, which is no module inside the model"
                + (f": did you mean {near!r}?" if near else "")
            )
    if len(set(split_points)) != len(split_points) or len(split_points) != processes - 1:
        raise ValueError(
            f"{processes} processes need {processes - 1} different split_points, one where each stage but the first begins; "
            f"got {list(split_points)!r}"
        )
    return list(split_points)


def _layers(atoms: Atoms) -> list[list[int]]:
    """The numbers of the atoms, together with those in front of which no stage can begin: tensors beside the children of a module."""
    layers: list[list[int]] = []
    has_begun = False
    for number in range(len(atoms)):
        begins = atoms.modules[number] not in atoms.split
        if not layers or (begins and has_begun):
            layers.append([number])
        else:
            layers[-1].append(number)
        has_begun = has_begun or begins
    return layers
