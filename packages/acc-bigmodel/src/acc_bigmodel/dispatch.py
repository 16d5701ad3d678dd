"""Run a model where its parts are: hooks that bring inputs and offloaded weights to the device that computes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from acc_bigmodel import device_map as device_maps
from acc_bigmodel.budget import DeviceKey, check_present, device_key
from acc_bigmodel.device_map import devices_of, expand_device_map
from acc_bigmodel.guard import guard_moves
from acc_bigmodel.kept import OnDisk, check_disk, in_memory, keep, kept_where, on_disk_before, refuse_empty
from acc_bigmodel.measure import modules_in_order
from acc_bigmodel.offload import offload_or_reuse, offloading_into
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.stores.disk import OffloadedWeightsLoader
from acc_hooks.align import AlignDevicesHook
from acc_hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    is_attached,
)
from acc_hooks.hook import add_hook_to_module, attached_hook, iterate_hooks, remove_hook_from_module
from acc_hooks.offload import CpuOffload, UserCpuOffloadHook
from acc_hooks.prefetch import LAYERS_AHEAD
from acc_hooks.tensors import owner_of, put_tensor, set_module_tensor_to_device
from acc_hooks.ties import every_tensor
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
    return dispatch_checked(
        model,
        device_map,
        main_device=main_device,
        state_dict=state_dict,
        offload_dir=offload_dir,
        offload_index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        prefetch=prefetch,
    )


def dispatch_checked(
    model: nn.Module,
    device_map: Mapping[str, DeviceKey],
    *,
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
    """`dispatch_model` for a map that was checked, with what it warns about."""
    devices = _by_first_names(model, {key: device_key(device) for key, device in device_map.items()})
    used = list(dict.fromkeys(devices.values()))
    if len(used) == 1 and used[0] != DISK and not force_hooks:
        _bring_back(model)
        refuse_empty(dict(every_tensor(model)), used[0])
        model.to(canonical_device(used[0]))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    _refuse_meta(devices)
    main = _main_device(main_device, used)
    offloaded = {path: _is_offloaded(device, main) for path, device in _blocks(model, devices, main).items()}
    disk = _on_disk(model, offload_dir, offload_index)
    check_disk(kept_where(model, devices, offloaded, main, offload_buffers), disk)
    _bring_back(model)
    with _as_it_was(model):
        homes = kept_where(model, devices, offloaded, main, offload_buffers)
        kept = {name: home for name, home in homes.items() if home == CPU or home != main}
        blocks = _blocks(model, devices, main)
        attach_align_device_hook_on_blocks(
            model,
            execution_device={
                path: canonical_device(main if offloaded[path] else device) for path, device in blocks.items()
            },
            offload=offloaded,
            weights_map=keep(model, kept, state_dict, disk) if kept else None,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            prefetch=prefetch,
            staying=homes.keys() - kept.keys(),
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
        refuse_empty(values, CPU)
        state_dict = in_memory(values)
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
    with offloading_into(offload_dir):
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
    with _as_it_was(model):
        attach_align_device_hook(
            model,
            execution_device=canonical_device(execution_device),
            offload=True,
            offload_buffers=offload_buffers,
            weights_map=weights,
            preload_module_classes=preload_module_classes,
            prefetch=prefetch,
            io_same_device=True,
        )
    guard_moves(model)
    return model


def _bring_back(model: nn.Module) -> None:
    """Take a dispatched or offloaded model out of its hooks, with what was changed: they would be called beside the new ones.

    RuntimeError if it is offloaded and that would remove hooks of another kind. If nothing is offloaded, hooks that somebody
    made by hand stay, and all others.
    """
    hooks = [
        (path, hook)
        for path, module in model.named_modules()
        for hook in iterate_hooks(attached_hook(module))
    ]
    is_offloaded = any(isinstance(hook, AlignDevicesHook) and hook.offload for _, hook in hooks)
    if not is_offloaded and not all(is_attached(hook) for _, hook in hooks):
        return
    for path, hook in hooks:
        if not isinstance(hook, AlignDevicesHook):
            raise RuntimeError(
                f"this model is offloaded already, and offloading it anew would remove the {type(hook).__name__} of "
                f"{path or 'the whole model'!r}: call remove_hook_from_module(model, recurse=True) first, and attach "
                "that hook again"
            )
    remove_hook_from_module(model, recurse=True)


def _main_device(main_device: DeviceKey | None, used: list[Device]) -> Device:
    """What computes for the parts that are offloaded."""
    if main_device is None:
        return next((device for device in used if device not in (CPU, DISK)), CPU)
    main = device_key(main_device)
    if main in (DISK, "meta"):
        raise ValueError(f"main_device is {main_device!r}, which cannot compute: use 'cpu' or an accelerator")
    try:
        check_present({"": main})
    except ValueError as error:
        raise ValueError(
            f"main_device is {main_device!r}, which this machine does not have: leave it out, or use one that is there"
        ) from error
    return main


def _is_offloaded(device: Device, main: Device) -> bool:
    return device == DISK or (device == CPU and main != CPU)


def _by_first_names(model: nn.Module, devices: Mapping[str, Device]) -> dict[str, Device]:
    """The map with one place for a module that has several names: where the first of them is sent."""
    found = dict(devices)
    for path, first in _second_names(model):
        homes = devices_of(devices, [first, path])
        if first not in homes:
            continue
        as_first = {
            path + key[len(first) :]: to for key, to in devices.items() if key.startswith(f"{first}.")
        }
        second = [key for key in found if key == path or key.startswith(f"{path}.")]
        if not as_first and not second and homes.get(path) == homes[first]:
            continue  # one entry around both
        as_first[path] = homes[first]
        for key, home in devices_of(as_first, second).items():
            if found.pop(key) != home:
                logger.warning(
                    "The device map sends %r elsewhere than %r, which is the same module: it goes where %r is sent.",
                    key,
                    first,
                    first,
                )
        found.update(as_first)
    return found


def _second_names(model: nn.Module) -> list[tuple[str, str]]:
    """Every further name of a module, with its first; what is below a further name goes with it, and is left out."""
    first_name: dict[int, str] = {}
    further: set[str] = set()
    outermost: list[tuple[str, str]] = []
    for path, module in modules_in_order(model):
        first = first_name.setdefault(id(module), path)
        if first == path:
            continue
        if path.rpartition(".")[0] not in further:
            outermost.append((path, first))
        further.add(path)
    return outermost


def _blocks(model: nn.Module, devices: Mapping[str, Device], main: Device) -> dict[str, Device]:
    """The map in names of modules only: a module whose own tensors are on several devices computes on `main`, as an offloaded one."""
    modules = dict(modules_in_order(model))
    known = {key: device for key, device in devices.items() if key in modules}
    tensors = dict(every_tensor(model))
    if not any(key in tensors for key in devices):
        return known
    homes = expand_device_map(devices, tensors, default=main)
    own: dict[str, list[Device]] = {}
    for name, home in homes.items():
        own.setdefault(name.rpartition(".")[0], []).append(home)
    return {path: found[0] if len(set(found)) == 1 else DISK for path, found in own.items()}


def _bring_uncovered(model: nn.Module, devices: Mapping[str, Device], main: Device) -> None:
    """Buffers that no state dict holds need no device in a map: they go where the model computes."""
    names = [name for name, tensor in every_tensor(model) if tensor.device.type != "meta"]
    covered = devices_of(devices, names)
    for name in names:
        if name not in covered:
            set_module_tensor_to_device(model, name, canonical_device(main))


def _on_disk(
    model: nn.Module,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
) -> OnDisk:
    """Where the weights on the disk are: as the user says, else where they were."""
    before = on_disk_before(model)
    is_said = offload_dir is not None or offload_index is not None
    return replace(before, index=offload_index, folder=offload_dir if is_said else before.folder)


def _refuse_meta(devices: Mapping[str, Device]) -> None:
    for key, device in devices.items():
        if device == "meta":
            raise ValueError(
                f"the device map sends {key or 'the whole model'!r} to 'meta', where tensors have no values and nothing can "
                "run: use a device that computes, 'cpu' or 'disk'"
            )


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """An exception puts every tensor back that the model has now."""
    before = dict(every_tensor(model))
    try:
        yield
    except BaseException:
        for name, tensor in before.items():
            put_tensor(*owner_of(model, name), tensor)
        raise
