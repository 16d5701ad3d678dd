"""Where the weights of an offloaded model are kept while it does not compute with them: in memory, or on the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from acc_bigmodel import device_map as device_maps
from acc_bigmodel.device_map import expand_device_map
from acc_bigmodel.load_plan import buffer_names
from acc_bigmodel.offload import offload_or_reuse, offloading_into
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.stores.disk import OffloadedWeightsLoader
from acc_bigmodel.stores.folder import same_bytes, weight_of
from acc_bigmodel.stores.safetensors import SafetensorsStore
from acc_bigmodel.stores.store import FileSlice
from acc_bigmodel.weights import weights_of
from acc_hooks.placeholder import is_placeholder
from acc_hooks.tensors import get_tensor, owner_of, put_tensor, set_module_tensor_to_device
from acc_hooks.ties import every_tensor, group_by_tensor
from acc_ops.devices import canonical_device


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Where weights for the disk are, or may be written."""

    index: Mapping[str, Any] | None = None  # said by the user
    folder: str | os.PathLike[str] | None = None  # to write into
    # where they were before, if they are there still
    slices: Mapping[str, FileSlice] = field(default_factory=dict)


def on_disk_before(model: nn.Module) -> OnDisk:
    """Where the weights of a model are on the disk that is dispatched already: they need not be written again."""
    weights = weights_of(model)
    slices: dict[str, FileSlice] = {}
    folder = None
    for name, tensor in every_tensor(model):
        if not is_placeholder(tensor):
            continue
        place = weights.place(name)
        source = weights.source(name)
        if source is not None:
            slices[name] = source
        elif place.file is not None:
            folder = os.path.dirname(place.file)
    return OnDisk(folder=folder, slices=slices)


def in_memory(
    values: Mapping[str, torch.Tensor], kept: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """The values where they are kept (default: on the CPU); names that share one share it again on each device."""
    leader_of = {name: group[0] for group in group_by_tensor(values.items()) for name in group}
    moved: dict[tuple[str, Device], torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in values.items():
        home = CPU if kept is None or kept[name] == DISK else kept[name]
        place = leader_of.get(name, name), home
        if place not in moved:
            moved[place] = tensor.detach().to(canonical_device(home))
        result[name] = moved[place]
    return result


def kept_where(
    model: nn.Module,
    devices: Mapping[str, Device],
    offloaded: Mapping[str, bool],
    main: Device,
    offload_buffers: bool,
) -> dict[str, Device]:
    """Where every tensor of an offloaded block is kept: on the disk, on the CPU or an accelerator, as the map says.

    `offloaded` says of each block whether it is; buffers, unless `offload_buffers`, and those that no state dict holds stay.
    What is kept on `main`, if that is an accelerator, need not be brought over. A tie of which one name is on the CPU needs
    no second copy on the disk.
    """
    values = dict(every_tensor(model))
    wanted = expand_device_map(devices, values, default=main)
    is_away = expand_device_map(
        {path: DISK if away else CPU for path, away in offloaded.items()}, values, CPU
    )
    persistent = set(device_maps.state_names(model))
    buffers = buffer_names(model)
    kept: dict[str, Device] = {}
    for name, away in is_away.items():
        stays = name in buffers and not (offload_buffers and name in persistent)
        if away == DISK and not stays:
            kept[name] = wanted[name]
    for names in group_by_tensor(values.items()):
        if any(kept.get(name, wanted[name]) == CPU for name in names):
            kept.update((name, CPU) for name in names if kept.get(name) == DISK)
    return kept


def check_disk(kept: Mapping[str, Device], disk: OnDisk) -> None:
    """Raise ValueError if there are weights for the disk which are not there, and no folder to write them to."""
    if disk.folder is not None:
        return
    lost = [name for name, home in kept.items() if home == DISK and name not in disk.slices]
    if lost and disk.index is None:
        raise ValueError(
            f"{len(lost)} tensors are for the disk, the first is {lost[0]!r}: give an offload_dir to write "
            "them to, or the offload_index that says where they are"
        )
    lost = [name for name in lost if name not in (disk.index or {})]
    if lost:
        raise ValueError(
            f"the offload index does not say where {lost[0]!r} is, nor {len(lost) - 1} others: give an "
            "offload_dir to write them to"
        )


def keep(
    model: nn.Module,
    kept: Mapping[str, Device],
    state_dict: Mapping[str, torch.Tensor] | None,
    disk: OnDisk,
) -> OffloadedWeightsLoader:
    """The offloaded tensors: those for the disk behind an index, and mapped, the others in memory where they are kept.

    What is on the disk nowhere yet is written to `disk.folder`; without one, what was changed since it was read from its
    file stays in memory. Values of `state_dict` go before the model's own. Tensors on meta get their mapped values.
    """
    values = {name: tensor for name, tensor in every_tensor(model) if name in kept}
    given = {name: value for name, value in (state_dict or {}).items() if kept.get(name, DISK) != DISK}
    index = {name: info for name, info in (disk.index or {}).items() if kept.get(weight_of(name)) == DISK}
    on_disk = {name: tensor for name, tensor in values.items() if kept[name] == DISK}
    index.update(_still_there({name: on_disk[name] for name in on_disk.keys() - index.keys()}, disk.slices))
    to_write = {name: tensor for name, tensor in on_disk.items() if name not in index}
    with ExitStack() as writing:
        if to_write and disk.folder is not None:
            writing.enter_context(offloading_into(disk.folder))  # until they are mapped
            index.update(offload_or_reuse(disk.folder, to_write))
        own = {name: tensor for name, tensor in values.items() if name not in given and name not in index}
        refuse_empty(own, CPU)
        weights = OffloadedWeightsLoader(
            state_dict={**given, **in_memory(own, kept)}, save_folder=disk.folder, index=index
        )
        weights.hold(index)
    _map_placeholders(model, on_disk, weights)
    return weights


def refuse_empty(values: Mapping[str, torch.Tensor], device: Device) -> None:
    """Raise ValueError for the first tensor without values."""
    for name, tensor in values.items():
        if tensor.device.type == "meta" and device != "meta":
            raise ValueError(
                f"{name!r} is on the meta device and has no values to put on {device!r}: load it first"
            )


def _still_there(
    values: Mapping[str, torch.Tensor], slices: Mapping[str, FileSlice]
) -> dict[str, dict[str, Any]]:
    """The index entries of the tensors that their files still hold."""
    stores: dict[str, SafetensorsStore] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in values.items():
        source = slices.get(name)
        if source is None:
            continue
        try:
            if source.file not in stores:
                stores[source.file] = SafetensorsStore(source.file)
            stored = stores[source.file][source.name]
        except (OSError, KeyError, ValueError):  # gone, or replaced by another
            continue
        if same_bytes(stored, tensor.to(CPU)):
            found[name] = source.index_entry()
    return found


def _map_placeholders(
    model: nn.Module, on_disk: Mapping[str, torch.Tensor], weights: OffloadedWeightsLoader
) -> None:
    """Give tensors on meta their mapped values, which cost no memory, so that removing the hooks leaves a whole model."""
    mapped: dict[int, torch.Tensor] = {}
    for name, tensor in on_disk.items():
        if tensor.device.type != "meta" or name not in weights:
            continue
        if id(tensor) not in mapped:
            if _is_mapped(weights, name, tensor):
                set_module_tensor_to_device(model, name, CPU, value=weights[name])
            mapped[id(tensor)] = _value(model, name)
        put_tensor(*owner_of(model, name), mapped[id(tensor)])


def _is_mapped(weights: OffloadedWeightsLoader, name: str, tensor: torch.Tensor) -> bool:
    info = weights.index.get(name, {})
    as_stored = info.get("safetensors_file") is None or weights.source(name) is not None
    return as_stored and weights.dtype(name) == tensor.dtype


def _value(model: nn.Module, name: str) -> torch.Tensor:
    tensor = get_tensor(model, name)
    assert tensor is not None, name
    return tensor
