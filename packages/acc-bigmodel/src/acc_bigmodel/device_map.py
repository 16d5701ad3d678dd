"""Device maps: names of modules or tensors -> devices; made by the planner, checked, and expanded to every tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from acc_bigmodel.atoms import collapse, group_atoms
from acc_bigmodel.budget import DeviceKey, MaxMemory, device_key, device_rank, get_max_memory
from acc_bigmodel.measure import DtypeLike, as_class_names, below, is_piece, modules_in_order, take_inventory
from acc_bigmodel.placement import CPU, DISK, Device, Placement, placement_of_map, plan
from acc_hooks.ties import every_tensor
from acc_ops.option_fields import hint

logger = logging.getLogger(__name__)

D = TypeVar("D")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """A device map that keeps to `max_memory` (default: what is free); what fits nowhere else goes to "disk".

    Parameters are those of `plan_model`, whose device map this is, in the order of the devices. `clean_result=False`
    names every layer instead of whole modules; `verbose` prints the plan. `fallback_allocation` has no effect: a device
    that cannot hold the next layer always takes later ones that fit.
    """
    placement = plan_model(
        model,
        max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        offload_buffers=offload_buffers,
    )
    if fallback_allocation:
        logger.info(
            "fallback_allocation has no effect: layers that fit are always sought for an empty device."
        )
    for note in placement.notes:
        logger.warning("%s", note)
    if verbose:
        print(placement.table(), end="")
    return placement.device_map(clean=clean_result)


def plan_model(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    *,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    offload_buffers: bool = False,
) -> Placement:
    """The `Placement` behind `infer_auto_device_map`: it prints (`table()`), draws (`svg()`) and explains itself (`why`).

    Modules of the classes `no_split_module_classes` stay whole, modules that share tensors stay together. Sizes are those
    in `dtype` (see `compute_module_sizes`). "disk" has no limit unless `max_memory` gives one. Unless `offload_buffers`,
    the buffers of what is offloaded need room on the executing device.

    Raises PlacementError (a ValueError) when the budgets cannot hold the model.
    """
    _warn_of_absent(model, as_class_names(no_split_module_classes))
    inventory = take_inventory(model, dtype, special_dtypes, no_split_module_classes)
    budgets: dict[Device, int | None] = dict(get_max_memory(max_memory))
    budgets.setdefault(DISK, None)
    return plan(
        inventory.sizes,
        budgets,
        ties=inventory.ties,
        blocks=inventory.blocks,
        staying=() if offload_buffers else inventory.buffers,
    )


def describe_device_map(
    model: nn.Module,
    device_map: Mapping[str, DeviceKey],
    max_memory: MaxMemory | None = None,
    dtype: DtypeLike | None = None,
) -> Placement:
    """A device map, wherever it comes from, as a `Placement` to print or draw; `max_memory` are the budgets to show.

    Raises ValueError for a tensor that the map gives no device.
    """
    inventory = take_inventory(model, dtype)
    homes = expand_device_map(device_map, inventory.sizes)  # by tensor
    blocks = {key for key in device_map if key not in inventory.sizes and not _is_split(key, device_map)}
    atoms = group_atoms(inventory.sizes, (), blocks, inventory.buffers)
    shown = dict(get_max_memory(max_memory)) if max_memory is not None else {}
    seen = sorted(set(homes.values()), key=device_rank)
    budgets: dict[Device, int | None] = {
        **shown,
        **dict.fromkeys(device for device in seen if device not in shown),
    }
    return placement_of_map(
        atoms, [homes[atoms.tensors_of(number)[0]] for number in range(len(atoms))], budgets
    )


def expand_device_map(
    device_map: Mapping[str, DeviceKey], names: Iterable[str], default: Device | None = None
) -> dict[str, Device]:
    """The device of every tensor in `names`: that of the longest key that is the name, a module around it, or "".

    Devices come in one form (see `device_key`). Tensors without one get `default`; when that is None this raises ValueError naming the tensors without a device.
    """
    names = list(names)
    found = devices_of(device_map, names)
    if default is not None:
        return {name: found.get(name, default) for name in names}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"the device map gives no device to {_listing(missing)}; add them, a module around them, or '' for everything"
        )
    return found


def devices_of(device_map: Mapping[str, DeviceKey], names: Iterable[str]) -> dict[str, Device]:
    """As `expand_device_map`, without those that have no device."""
    check_form(device_map)
    devices = {key: device_key(device) for key, device in device_map.items()}
    by_module: dict[str, Device | None] = {}

    def of_module(module: str) -> Device | None:
        path = []
        while module not in by_module:
            path.append(module)
            if module in devices or not module:
                by_module[module] = devices.get(module)
                break
            module = module.rpartition(".")[0]
        for part in path:
            by_module[part] = by_module[module]
        return by_module[module]

    found: dict[str, Device] = {}
    for name in names:
        device = devices[name] if name in devices else of_module(name.rpartition(".")[0])
        if device is not None:
            found[name] = device
    return found


def check_device_map(model: nn.Module, device_map: Mapping[str, DeviceKey]) -> None:
    """Check that every entry of the model's state dict has a device; warns about keys that name nothing in the model.

    Raises ValueError naming the tensors without a device.
    """
    check_form(device_map)
    names = state_names(model)
    modules = {path for path, _ in modules_in_order(model)}
    tensors = {name for name, _ in every_tensor(model)}
    for key in device_map:
        if key and key not in modules and key not in tensors:
            logger.warning(
                "The device map names %r, which is not in the model%s", key, hint(key, modules - {""})
            )
    expand_device_map(device_map, names)


def clean_device_map(device_map: dict[str, D], module_name: str = "") -> dict[str, D]:
    """Let modules stand for their parts where these all have one device, at or below `module_name`; in place, and returned."""
    collapsed = collapse(device_map, module_name)
    device_map.clear()
    device_map.update(collapsed)
    return device_map


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[tuple[str, nn.Module | torch.Tensor]]]:
    """Search breadth-first for a module that fits in `size_limit` together with what is tied to it.

    Returns its name, the module, and the modules that remain (those around it split up); (None, None, modules) when
    nothing fits or the limit cannot be read.
    """
    try:
        limit = get_max_memory({CPU: size_limit})[CPU]
    except ValueError:
        return None, None, list(modules)
    whole = frozenset(as_class_names(no_split_module_classes))
    level = list(modules)
    while level:
        for name, module in level:
            if _size_with_ties(name, module_sizes, tied_parameters or ()) <= limit:
                return name, module, _without(name, modules)
        level = [
            part for name, module in level if isinstance(module, nn.Module) and not is_piece(module, whole)
            for part in below(name, module)
        ]  # fmt: skip
    return None, None, list(modules)


def state_names(model: nn.Module) -> list[str]:
    """The names of the parameters and persistent buffers, as in the state dict, in the order of the modules."""
    names = []
    for path, module in modules_in_order(model):
        prefix = f"{path}." if path else ""
        names += [prefix + name for name, tensor in module._parameters.items() if tensor is not None]
        names += [
            prefix + name
            for name, tensor in module._buffers.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]
    return names


def _without(
    name: str, modules: Sequence[tuple[str, nn.Module | torch.Tensor]]
) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """The modules without the one called `name`; a module around it is replaced by its parts."""
    remaining: list[tuple[str, nn.Module | torch.Tensor]] = []
    for outer, module in modules:
        if outer == name:
            continue
        if isinstance(module, nn.Module) and (not outer or name.startswith(outer + ".")):
            remaining += _without(name, below(outer, module))
        else:
            remaining.append((outer, module))
    return remaining


def _size_with_ties(name: str, module_sizes: Mapping[str, int], ties: Sequence[Sequence[str]]) -> int:
    total = module_sizes.get(name, 0)
    for group in ties:
        inside = [tied for tied in group if tied == name or tied.startswith(name + ".")]
        if inside and len(inside) < len(
            group
        ):  # the shared tensor comes along wherever its bytes were counted
            counted = max(module_sizes.get(tied, 0) for tied in group)
            total += counted - max(module_sizes.get(tied, 0) for tied in inside)
    return total


def _is_split(key: str, device_map: Mapping[str, DeviceKey]) -> bool:
    return any(other != key and (not key or other.startswith(key + ".")) for other in device_map)


def check_form(device_map: object) -> None:
    """Raise ValueError unless this is a mapping of names."""
    if not isinstance(device_map, Mapping):
        raise ValueError(f"the device map is {device_map!r}, but must map names of modules to devices")
    for key in device_map:
        if not isinstance(key, str):
            raise ValueError(
                f"the device map has the key {key!r}, but keys are names of modules or tensors, '' the whole model: "
                f"use {str(key)!r} for a part of that name"
            )


def _warn_of_absent(model: nn.Module, classes: Sequence[str]) -> None:
    """Say that classes are not in the model; one of several may belong to another variant of it, and is only noted."""
    there = {type(module).__name__ for _, module in modules_in_order(model)}
    absent = [name for name in classes if name not in there]
    if absent:
        logger.log(
            logging.WARNING if len(absent) == len(classes) else logging.INFO,
            "no_split_module_classes names %s, but the model has no such module%s",
            ", ".join(absent),
            hint(absent[0], there),
        )


def _listing(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
