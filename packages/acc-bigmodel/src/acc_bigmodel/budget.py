"""How many bytes each device may take: what is free, what the user allows, what balances several devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from acc_bigmodel.atoms import group_atoms
from acc_bigmodel.balance import balanced_loads, next_bytes
from acc_bigmodel.cgroup import group_free_bytes
from acc_bigmodel.measure import DtypeLike, take_inventory
from acc_bigmodel.placement import CPU, DISK, Device
from acc_ops import devices
from acc_ops.devices import DeviceRow, device_count, device_module, device_row, memory_info, present_kind
from acc_ops.units import convert_file_size_to_int

logger = logging.getLogger(__name__)

DeviceKey = int | str | torch.device
MaxMemory = Mapping[Any, int | str]  # the keys are devices in any form

_SINGLE_DEVICE_SHARE = 0.9  # one device computes too: leave it room for activations


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[Device, int]:
    """The bytes that each device may take: accelerators by index in order, then "mps" (which has none), "cpu", "disk".

    Without an argument, what is free now: no more than the container allows (cgroup.py), and memory that accelerators share
    with the CPU only once, without a "cpu". With one, a new dict with sizes such as "10GiB" in bytes and devices in any
    form (0, "cuda:0", torch.device("cuda", 0)) as index. A device that this machine does not have is only warned about:
    plans are made for other machines too. Raises ValueError for a key that is no device and a size that is none.
    """
    if max_memory is None:
        return _free_memory()
    if not isinstance(max_memory, Mapping):
        raise ValueError(
            f"max_memory is {max_memory!r}, but must map devices to sizes, such as {{0: '10GiB', 'cpu': '30GiB'}}"
        )
    budgets: dict[Device, int] = {}
    for key, size in max_memory.items():
        device = device_key(key)
        if device == "meta":
            raise ValueError(
                f"max_memory gives {key!r} a budget, but tensors on it take no memory; use accelerators, 'mps', 'cpu' or 'disk'"
            )
        if device in budgets:
            raise ValueError(f"max_memory gives {device!r} two budgets: {list(max_memory)!r}")
        budgets[device] = _size(key, size)
    there = _accelerators()
    missing = [device for device in budgets if isinstance(device, int) and device >= there]
    if missing:
        logger.warning(
            "max_memory names the devices %s, but this machine has %d: the plan is for another one.",
            missing,
            there,
        )
    return dict(sorted(budgets.items(), key=lambda item: device_rank(item[0])))


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Budgets under which `infer_auto_device_map` fills the accelerators evenly; never above what was given.

    The fullest one is as empty as the layers allow. The last keeps its whole budget, for whatever the model needs beside
    this. `low_zero` leaves on the first only what the others cannot hold. Without a `max_memory` of the user, a single
    accelerator gets 90 % of what is free. A model that does not fit on the accelerators leaves the budgets as they are.
    """
    budgets = get_max_memory(max_memory)
    used = [device for device, budget in budgets.items() if device not in (CPU, DISK) and budget > 0]
    if not used:
        return budgets
    if len(used) == 1:
        share = _SINGLE_DEVICE_SHARE if max_memory is None else 1
        return {**budgets, used[0]: int(budgets[used[0]] * share)}
    inventory = take_inventory(model, dtype, special_dtypes, no_split_module_classes)
    atoms = group_atoms(inventory.sizes, inventory.ties, inventory.blocks)
    loads = balanced_loads(atoms, [budgets[device] for device in used], low_zero=low_zero)
    if loads is None:
        return budgets
    placed = 0
    for device, load in zip(used[:-1], loads, strict=False):
        placed += load
        # half of the next layer is slack: it changes no plan, and forgives small differences of size
        slack = next_bytes(atoms, placed) // 2 if load else 0
        budgets[device] = min(budgets[device], load + slack)
    return budgets


def device_key(device: DeviceKey) -> Device:
    """The form in which budgets and device maps name a device: an accelerator's index, "mps", "cpu" or "disk".

    Raises ValueError for anything that is no device.
    """
    if device in _after_accelerators():
        return str(device)
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str) and device.isdecimal():
        return int(device)
    if isinstance(device, (str, torch.device)):
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"{device!r} is no device; use an index, 'cuda:0', 'mps', 'cpu' or 'disk'"
            ) from error
        return parsed.type if parsed.type in (*_single_kinds(), CPU, "meta") else parsed.index or 0
    raise ValueError(f"{device!r} is no device; use an index, 'cuda:0', 'mps', 'cpu' or 'disk'")


def device_rank(device: Device) -> tuple[int, int]:
    """What sorts devices into the order of their use: accelerators by index, "mps", "cpu", "disk"."""
    if isinstance(device, int):
        return 0, device
    named = _after_accelerators()
    return 1, named.index(device) if device in named else len(named)


def check_present(device_map: Mapping[str, DeviceKey]) -> None:
    """Raise ValueError for the first entry of a device map whose device this machine does not have."""
    there = _accelerators()
    for key, device in device_map.items():
        found = device_key(device)
        is_absent = found >= there if isinstance(found, int) else found in _single_kinds() - {present_kind()}
        if is_absent:
            raise ValueError(
                f"the device map sends {key or 'the whole model'!r} to {device!r}, but this machine has {there} numbered "
                "accelerators: change the map, or run it where the device is"
            )


def _size(key: object, size: int | str) -> int:
    try:
        return convert_file_size_to_int(size)
    except ValueError as error:
        raise ValueError(f"max_memory gives {key!r} the budget {size!r}: {error}") from None


def _accelerators() -> int:
    """How many devices have an index here."""
    kind = present_kind()
    return 0 if kind == CPU or kind in _single_kinds() else device_count(kind)


def _single_kinds() -> set[str]:
    """The kinds that are named without an index."""
    return {row.kind for row in devices.DEVICE_TABLE if row.single}


def _after_accelerators() -> list[str]:
    return [*sorted(_single_kinds()), CPU, DISK]


def _free_memory() -> dict[Device, int]:
    row = device_row(present_kind())
    host = _host_free_bytes()
    if row.kind == CPU:
        return {CPU: host}
    budgets: dict[Device, int] = {}
    there = [torch.device(row.kind, index) for index in range(device_count(row))]
    sharing = [device for device in there if _shares_host_memory(row, device)]
    for device in there:
        free = memory_info(device).free_bytes
        budgets[row.kind if row.single else device.index] = (
            min(free, host // len(sharing)) if device in sharing else free
        )
    # memory that is the accelerators' as well counts once
    return budgets if sharing else {**budgets, CPU: host}


def _host_free_bytes() -> int:
    """What is available on this machine, or in the container that this process runs in."""
    free = memory_info(CPU).free_bytes
    allowed = group_free_bytes()
    return free if allowed is None else min(free, allowed)


def _shares_host_memory(row: DeviceRow, device: torch.device) -> bool:
    """Whether a device has no memory of its own: its kind has none, or it says that it is an integrated one."""
    if row.shares_host_memory:
        return True
    ask = getattr(device_module(row), "get_device_properties", None)
    return ask is not None and bool(getattr(ask(device), "is_integrated", False))
