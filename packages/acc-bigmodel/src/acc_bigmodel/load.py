"""Checkpoints into models: every tensor straight to its place, and a report of what was loaded and what was not.

[Note: the ways of one tensor]
    to a device                 read and put there
    to the CPU                  mapped: the parameter is a view of the file, until somebody writes to it; from a torch.save
                                file copied, as those are overwritten in place
    into a real tensor          copied into it, so that the parameter stays the same object
    to the disk                 left where it is when it is a safetensors slice of the right dtype; else written, converted,
                                to a safetensors file in the offload folder. The parameter is then on meta.
Everything is checked before the first tensor is touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from acc_bigmodel import device_map as device_maps
from acc_bigmodel.apply import ready_to_apply
from acc_bigmodel.budget import DeviceKey, MaxMemory, check_present, device_key, get_balanced_memory
from acc_bigmodel.checkpoint_files import open_store
from acc_bigmodel.device_map import expand_device_map, infer_auto_device_map, state_names
from acc_bigmodel.load_plan import (
    CheckpointMismatch,
    LoadReport,
    LoadWishes,
    Step,
    find_conflicts,
    named,
    plan_load,
)
from acc_bigmodel.load_together import BroadcastStore, load_sharded
from acc_bigmodel.offload import offloading_into
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.stores.safetensors import SafetensorsStore, check_format
from acc_bigmodel.stores.torch_file import read_torch_file
from acc_hooks.prefetch import LAYERS_AHEAD
from acc_hooks.ties import every_tensor
from acc_ops.devices import canonical_device
from acc_ops.exchange import together
from acc_ops.modules import model_has_dtensor
from acc_ops.world import current_world

logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, DeviceKey] | None = None
) -> dict[str, Any]:
    """The contents of one weights file; `device_map` sends the tensors of a safetensors file to their devices.

    On the CPU, where everything unlisted or meant for the disk stays, tensors are mapped. Other files are read into memory
    by torch.load with `weights_only=True`. Raises ValueError for a damaged file or weights of TensorFlow or Flax, OSError
    for a safetensors file of an unknown format.
    """
    file = os.fspath(checkpoint_file)
    if not file.endswith(".safetensors"):
        content: dict[str, Any] = read_torch_file(file)
        return content
    store = SafetensorsStore(file)
    if not check_format(store):
        logger.warning("%s does not say for which framework it was written: taking it for torch's.", file)
    if not device_map:
        return {name: store[name] for name in store}
    homes = expand_device_map({"": CPU, **device_map}, store)
    devices = {
        home: torch.device(CPU) if home == DISK else canonical_device(home) for home in set(homes.values())
    }
    return {name: store[name].to(devices[homes[name]]) for name in store}


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, DeviceKey] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> LoadReport:
    """Load a checkpoint (a file, an index, a folder, a hub id) into `model`, each tensor on its device.

    Floating tensors take `dtype`, a floating one, or the dtype the model has; with float16, names in `keep_in_fp32_modules` stay float32.
    Without a `device_map` tensors stay where the model has them, and come to the CPU from meta. Names in the checkpoint
    and in the model that have no counterpart, and tied names with different values, are in the report and in a warning, or
    an error with `strict`. Buffers of
    offloaded modules stay in memory unless `offload_buffers`. With `offload_8bit_bnb` weights for the disk of which
    bitsandbytes makes 8-bit ones (Linear8bitLt's) are quantised before they are written. For a model of sharded tensors, `full_state_dict` and
    `broadcast_from_rank0` are those of torch.distributed.checkpoint; in the latter case other ranks read nothing.
    `offload_state_dict` has no effect: mapped weights need no temporary folder.

    Raises ValueError when there is nothing usable, a file is damaged, shapes differ, a tensor has no device or one that is
    not there, or something goes to the disk without an `offload_folder`. The model is then as it was.
    """
    if offload_state_dict:
        logger.info("offload_state_dict has no effect: weights are mapped, not held in memory while loading.")
    if device_map is None and model_has_dtensor(model):
        if dtype is not None:
            logger.warning("dtype=%s has no effect: sharded parameters keep the dtype they have", dtype)
        return load_sharded(
            model,
            checkpoint,
            current_world(),
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )

    def decide() -> tuple[Mapping[str, DeviceKey] | None, LoadWishes]:
        if device_map is not None:
            device_maps.check_form(device_map)
        if offload_folder is None and DISK in map(device_key, (device_map or {}).values()):
            raise ValueError("the device map sends modules to the disk: give an offload_folder for them")
        return device_map, LoadWishes(
            dtype=dtype,
            keep_in_fp32=tuple(keep_in_fp32_modules or ()),
            offload_buffers=offload_buffers,
            offload_folder=offload_folder,
            quantise_8bit=offload_8bit_bnb,
        )

    return _load(
        model, checkpoint, decide, lambda report, _: report, strict=strict, broadcast=broadcast_from_rank0
    )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, DeviceKey] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    prefetch: int = LAYERS_AHEAD,
) -> nn.Module:
    """Load a checkpoint into `model` and give it the hooks with which it runs where its parts are; returns the model.

    `device_map` may be made here: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" leaves the first one
    as empty as can be, "sequential" fills one after the other, all within `max_memory`. Without a map the weights are
    only loaded. Weights for the disk that are in a safetensors file of the right dtype are used in place, without an
    `offload_folder`. Other parameters as for `load_checkpoint_in_model` and `dispatch_model`.

    Raises ValueError for an unknown name of a map, CheckpointMismatch for a tensor on the meta device that the checkpoint
    lacks, and what those two raise.
    """
    if max_memory is not None and not isinstance(device_map, str):
        logger.warning(
            "max_memory has no effect without a device_map to be made, such as 'auto': got %r", device_map
        )
    if device_map is None:
        load_checkpoint_in_model(
            model,
            checkpoint,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        return model
    if offload_state_dict:
        logger.info("offload_state_dict has no effect: weights are mapped, not held in memory while loading.")
    from acc_bigmodel import dispatch as dispatching  # noqa: PLC0415 - loading alone needs no hooks

    given = device_map

    def decide() -> tuple[Mapping[str, DeviceKey], LoadWishes]:
        chosen = given
        if isinstance(chosen, str):
            chosen = _automatic_map(
                model, chosen, max_memory, no_split_module_classes, dtype, offload_buffers
            )
        device_maps.check_device_map(model, chosen)
        return chosen, LoadWishes(
            dtype=dtype, offload_buffers=offload_buffers, offload_folder=offload_folder, is_dispatched=True
        )

    def dispatch(report: LoadReport, chosen: Mapping[str, DeviceKey] | None) -> nn.Module:
        assert chosen is not None, "`decide` gives one"
        return dispatching.dispatch_checked(
            model,
            device_map=chosen,
            offload_dir=offload_folder,
            offload_index=report.index or None,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=force_hooks,
            prefetch=prefetch,
        )

    return _load(model, checkpoint, decide, dispatch, strict=strict, broadcast=broadcast_from_rank0)


def _load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    decide: Callable[[], tuple[Mapping[str, DeviceKey] | None, LoadWishes]],
    then: Callable[[LoadReport, Mapping[str, DeviceKey] | None], R],
    *,
    strict: bool,
    broadcast: bool,
) -> R:
    """Load as `decide` says, and give what `then` makes of the report; what was written for the disk is there to be mapped by it.

    With `broadcast` the ranks meet after each part, and all raise what one of them raises. None waits for another while it
    has the offload folder alone, which ranks may share.
    """
    world = current_world()
    broadcast = broadcast and world.size > 1

    def at_once(work: Callable[[], T]) -> T:
        return together(world, work) if broadcast else work()

    def decided() -> tuple[str, Mapping[str, DeviceKey] | None, LoadWishes]:
        device_map, wishes = decide()
        check_present(device_map or {})
        return os.fspath(checkpoint), device_map, wishes

    called, device_map, wishes = at_once(decided)
    store = BroadcastStore(checkpoint, world) if broadcast else open_store(checkpoint)

    def planned() -> tuple[list[Step], LoadReport]:
        homes = None if device_map is None else expand_device_map(_keys(device_map), state_names(model))
        steps, report = plan_load(model, store, homes, wishes, called=called)
        _refuse(model, called, report, strict, wishes.is_dispatched)
        return steps, report

    steps, report = at_once(planned)
    if isinstance(store, BroadcastStore):
        statistics = (step.statistics for step in steps if step.statistics is not None)
        store.receive([*(step.source for step in steps), *statistics])

    def compared() -> LoadReport:
        compared = replace(report, conflicting=find_conflicts(store, steps))
        _refuse(model, called, compared, strict, wishes.is_dispatched)
        return compared

    report = at_once(compared)
    with ready_to_apply(model, store, steps, report, wishes) as ready:

        def prepare() -> None:
            with _alone_in(wishes.offload_folder):
                ready.prepare()

        def commit() -> R:
            with _alone_in(wishes.offload_folder):
                report = ready.commit()
                if report.complaint():
                    logger.warning("loaded %s with differences: %s", called, report.complaint())
                return then(report, device_map)

        at_once(prepare)
        return at_once(commit)


def _keys(device_map: Mapping[str, DeviceKey]) -> dict[str, Device]:
    return {name: device_key(device) for name, device in device_map.items()}


def _alone_in(folder: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if folder is None else offloading_into(folder)


def _refuse(model: nn.Module, checkpoint: str, report: LoadReport, strict: bool, to_run: bool) -> None:
    if strict and report.complaint():
        raise CheckpointMismatch(f"{checkpoint} does not fit the model: {report.complaint()}")
    if to_run:
        refuse_gaps(model, checkpoint, report)


def refuse_gaps(model: nn.Module, checkpoint: str, report: LoadReport) -> None:
    """A tensor that is on meta and not in the checkpoint has no value anywhere; an offload folder is not asked for it."""
    tensors = dict(every_tensor(model))
    empty = [name for name in report.missing if name in tensors and tensors[name].device.type == "meta"]
    if empty:
        raise CheckpointMismatch(
            f"{named(empty)} would have no "
            f"values: {checkpoint} does not fit the model: {report.complaint()}. Tie or fill what it lacks first, or build "
            "the model with its values instead of empty"
        )


def _automatic_map(
    model: nn.Module,
    kind: str,
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Sequence[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> Mapping[str, DeviceKey]:
    if kind not in _AUTOMATIC:
        raise ValueError(f"device_map must be a mapping or one of {', '.join(_AUTOMATIC)}; got {kind!r}")
    if kind != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            low_zero=kind == "balanced_low_0",
        )
    return infer_auto_device_map(
        model,
        max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        offload_buffers=offload_buffers,
    )
