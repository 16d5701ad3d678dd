"""Run a model where its parts are: hooks that bring inputs and offloaded weights to the device that computes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from acc_bigmodel import device_map as device_maps
from acc_bigmodel.budget import DeviceKey, check_present, device_key
from acc_bigmodel.device_map import expand_device_map
from acc_bigmodel.guard import guard_moves
from acc_bigmodel.measure import modules_in_order
from acc_bigmodel.offload import offload_or_reuse
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.stores.disk import OffloadedWeightsLoader
from acc_hooks.align import AlignDevicesHook
from acc_hooks.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from acc_hooks.hook import add_hook_to_module, attached_hook, iterate_hooks, remove_hook_from_module
from acc_hooks.offload import CpuOffload, UserCpuOffloadHook
from acc_hooks.prefetch import LAYERS_AHEAD
from acc_hooks.tensors import get_tensor, owner_of, put_tensor, set_module_tensor_to_device
from acc_hooks.ties import every_tensor, group_by_tensor
from acc_hooks.visit import has_offloaded_params
from acc_ops.devices import canonical_device

logger = logging.getLogger(__name__)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, DeviceKey],
    main_device: DeviceKey | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    prefetch: int = LAYERS_AHEAD,
) -> nn.Module:
    """Put the parts of `model` where `device_map` says and make it run there; returns the model.

    One device for everything is a plain move, unless `force_hooks`. Otherwise `main_device` (default: the first
    accelerator of the map, else the CPU) computes what is on the disk, and with an accelerator what is on the CPU too:
    weights come for the time of a forward. They are kept in `state_dict` (default: the model's own) or on the disk, where
    `offload_index` says, or in `offload_dir`, into which they are written unless it already holds exactly them. Ties are
    kept; a model that is offloaded already is dispatched anew. While a module computes, the weights of up to `prefetch`
    others that run next are fetched (0: none). `model.hf_device_map` is the map; `model.to` and the accelerator's method
    warn, and raise RuntimeError while weights are offloaded.

    Raises ValueError for a tensor without a device or without a value, for a key that is no device of this machine, and
    for parts on the disk without `offload_dir` and `offload_index`; RuntimeError for an offloaded model with other hooks.
    """
    device_maps.check_device_map(model, device_map)
    check_present(device_map)
    devices = {key: device_key(device) for key, device in device_map.items()}
    _bring_back(model)
    used = list(dict.fromkeys(devices.values()))
    if len(used) == 1 and used[0] != DISK and not force_hooks:
        _refuse_empty(dict(every_tensor(model)), used[0])
        model.to(canonical_device(used[0]))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    main = device_key(main_device) if main_device is not None else _main_of(used)
    blocks = _blocks(model, devices, main)
    offloaded = {path: _is_offloaded(device, main) for path, device in blocks.items()}
    weights_map = None
    if any(offloaded.values()):
        kept = _kept_where(model, devices, blocks, main, offload_buffers)
        weights_map = _weights_map(model, kept, state_dict, offload_dir, offload_index)
    running = {path: canonical_device(main if offloaded[path] else device) for path, device in blocks.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device=running,
        offload=offloaded,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        prefetch=prefetch,
    )
    _bring_uncovered(model, devices, main)
    guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceKey | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
    prefetch: int = LAYERS_AHEAD,
) -> nn.Module:
    """Keep the weights in `state_dict` (default: the model's, on the CPU) and bring them over for each forward.

    `execution_device` defaults to the first parameter's device, `prefetch` as in `dispatch_model`. Returns the model, which
    refuses to be moved until its hooks are removed. One that is offloaded already is offloaded anew; RuntimeError if that
    would remove other hooks.
    """
    _bring_back(model)
    if state_dict is None:
        values = dict(every_tensor(model))
        _refuse_empty(values, CPU)
        state_dict = _on_cpu(values)
    return _offload_all(
        model, execution_device, offload_buffers, state_dict, preload_module_classes, prefetch
    )


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceKey | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep the whole model on the CPU until it is called; returns it and the hook whose `offload()` sends it back.

    `prev_module_hook` is the hook of the model that runs before, which leaves the device when this one comes.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: DeviceKey | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    prefetch: int = LAYERS_AHEAD,
) -> nn.Module:
    """Write the weights to `offload_dir` and map them from there for each forward; returns the model.

    What the folder already holds is used where its bytes are the model's, and replaced where they differ; a model that
    was offloaded there before keeps its own. `execution_device` defaults to the first parameter's device, `prefetch` as in
    `dispatch_model`. The model refuses to be moved until its hooks are removed. One that is offloaded already is offloaded
    anew; RuntimeError if that would remove other hooks.
    """
    _bring_back(model)
    index = offload_or_reuse(offload_dir, dict(every_tensor(model)))
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index)
    weights.hold()
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes, prefetch)


def _offload_all(
    model: nn.Module,
    execution_device: DeviceKey | None,
    offload_buffers: bool,
    weights: Mapping[str, torch.Tensor],
    preload_module_classes: list[str] | None,
    prefetch: int,
) -> nn.Module:
    if execution_device is None:
        first = next(model.parameters(), None)
        execution_device = torch.device(CPU) if first is None or first.device.type == "meta" else first.device
    device = canonical_device(execution_device)
    add_hook_to_module(model, AlignDevicesHook(execution_device=device, io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
        prefetch=prefetch,
    )
    guard_moves(model)
    return model


def _bring_back(model: nn.Module) -> None:
    """Take a model that is offloaded already out of its hooks: its values, with what was changed, are offloaded anew."""
    if not any(has_offloaded_params(module) for module in model.modules()):
        return
    for path, module in model.named_modules():
        for hook in iterate_hooks(attached_hook(module)):
            if not isinstance(hook, AlignDevicesHook):
                raise RuntimeError(
                    f"this model is offloaded already, and offloading it anew would remove the {type(hook).__name__} of "
                    f"{path or 'the whole model'!r}: call remove_hook_from_module(model, recurse=True) first, and attach "
                    "that hook again"
                )
    remove_hook_from_module(model, recurse=True)


def _refuse_empty(values: Mapping[str, torch.Tensor], device: Device) -> None:
    for name, tensor in values.items():
        if tensor.device.type == "meta" and device != "meta":
            raise ValueError(
                f"{name!r} is on the meta device and has no values to put on {device!r}: load it first"
            )


def _on_cpu(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values on the CPU, where names that share one share it again."""
    leader_of = {name: group[0] for group in group_by_tensor(values.items()) for name in group}
    moved: dict[str, torch.Tensor] = {}
    for name, tensor in values.items():
        leader = leader_of.get(name, name)
        moved[name] = moved[leader] if leader in moved else tensor.detach().to(CPU)
    return moved


def _main_of(used: list[Device]) -> Device:
    return next((device for device in used if device not in (CPU, DISK)), CPU)


def _is_offloaded(device: Device, main: Device) -> bool:
    return device == DISK or (device == CPU and main != CPU)


def _blocks(model: nn.Module, devices: Mapping[str, Device], main: Device) -> dict[str, Device]:
    """The map in names of modules only: a module whose own tensors are on several devices is offloaded if any of them is."""
    modules = dict(modules_in_order(model))
    known = {key: device for key, device in devices.items() if key in modules}
    tensors = dict(every_tensor(model))
    if not any(key in tensors for key in devices):
        return known
    homes = expand_device_map(devices, tensors, default=main)
    own: dict[str, list[Device]] = {}
    for name, home in homes.items():
        own.setdefault(name.rpartition(".")[0], []).append(home)
    return {
        path: DISK
        if DISK in found
        else next((device for device in found if _is_offloaded(device, main)), found[0])
        for path, found in own.items()
    }


def _bring_uncovered(model: nn.Module, devices: Mapping[str, Device], main: Device) -> None:
    """Buffers that no state dict holds need no device in a map: they go where the model computes."""
    names = [name for name, tensor in every_tensor(model) if tensor.device.type != "meta"]
    covered = expand_device_map(devices, names, default="nowhere")
    for name in names:
        if covered[name] == "nowhere":
            set_module_tensor_to_device(model, name, canonical_device(main))


def _kept_where(
    model: nn.Module,
    devices: Mapping[str, Device],
    blocks: Mapping[str, Device],
    main: Device,
    offload_buffers: bool,
) -> dict[str, Device]:
    """Where every tensor that is brought over for a forward is kept meanwhile: on the disk or on the CPU."""
    values = dict(every_tensor(model))
    wanted = expand_device_map(devices, values, default=main)
    modules = expand_device_map(blocks, values, default=main)
    persistent = set(device_maps.state_names(model))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    kept: dict[str, Device] = {}
    for name, module_device in modules.items():
        stays = name in buffers and not (offload_buffers and name in persistent)
        if _is_offloaded(module_device, main) and not stays:
            kept[name] = DISK if wanted[name] == DISK else CPU
    return kept


def _weights_map(
    model: nn.Module,
    kept: Mapping[str, Device],
    state_dict: dict[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader:
    """The offloaded tensors: those for the CPU in memory, those for the disk behind an index."""
    values = dict(every_tensor(model))
    on_disk = {name: values[name] for name, home in kept.items() if home == DISK}
    given = state_dict or {}
    own = {name: values[name] for name, home in kept.items() if home != DISK and name not in given}
    in_memory = {name: given[name] for name, home in kept.items() if home != DISK and name in given}
    in_memory.update(_on_cpu({name: tensor for name, tensor in own.items() if tensor.device.type != "meta"}))
    index = _index(on_disk, offload_dir, offload_index) if on_disk else {}
    weights = OffloadedWeightsLoader(state_dict=in_memory, save_folder=offload_dir, index=index)
    weights.hold(on_disk)
    _map_placeholders(model, on_disk, weights)
    return weights


def _index(
    on_disk: Mapping[str, torch.Tensor],
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    """The index of the tensors on the disk; what is not there yet and has values is written to the folder."""
    if offload_index is None and offload_dir is None:
        raise ValueError(
            f"{len(on_disk)} tensors are for the disk, the first is {next(iter(on_disk))!r}: give an offload_dir to write "
            "them to, or the offload_index that says where they are"
        )
    known = dict(offload_index or {})
    rest = {name: tensor for name, tensor in on_disk.items() if name not in known}
    if rest and offload_dir is not None:
        known.update(offload_or_reuse(offload_dir, rest))
    elif rest:
        raise ValueError(
            f"the offload index does not say where {next(iter(rest))!r} is, nor {len(rest) - 1} others: give an "
            "offload_dir to write them to"
        )
    return known


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
