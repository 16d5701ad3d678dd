"""A model with the weights of its linear layers in few bits: loaded and quantised weight by weight, on devices and on the disk.

[Note: in which order] Everything that can be checked is checked, then the plain tensors are loaded as `load_checkpoint_in_model` loads
them, then each weight is read, quantised and let go, so that never more than one is there with all its bits (beside those that are mapped).
The dtype of the rest is written into the empty model first: on meta that costs nothing, and plan, sizes and loading then agree.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from acc_bigmodel import CheckpointMismatch, dispatch_model, open_store, save_offload_index
from acc_bigmodel.apply import apply_steps
from acc_bigmodel.budget import DeviceKey, MaxMemory
from acc_bigmodel.device_map import check_device_map, expand_device_map, state_names
from acc_bigmodel.load import refuse_gaps
from acc_bigmodel.load_plan import LoadReport, LoadWishes, Step, find_conflicts, plan_load
from acc_bigmodel.offload import offloading_into
from acc_bigmodel.placement import DISK, Device
from acc_bigmodel.stores.pieces import give_back
from acc_bigmodel.stores.store import WeightStore
from acc_hooks.tensors import get_tensor, owner_of, place, put_tensor
from acc_hooks.ties import every_tensor, tied_groups
from acc_ops.devices import canonical_device
from acc_plugins.quantization.bnb_weights import is_statistics
from acc_plugins.quantization.choose import weight_format
from acc_plugins.quantization.device_maps import is_rest, quantized_device_map, rest_dtype
from acc_plugins.quantization.format import Stored, WeightFormat
from acc_plugins.quantization.layers import is_named

logger = logging.getLogger(__name__)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: Any,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, DeviceKey] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Give the linear layers of `model` weights in few bits, loaded from `weights_location` or its own; returns the model, ready to run.

    `bnb_quantization_config` is a `BnbQuantizationConfig`, a configuration object of torchao, or the name of one ("int8_weight_only").
    An empty model (`init_empty_weights`) is loaded from a file, an index, a folder or a hub id, which may hold full or packed weights
    (of bitsandbytes, as a saved state dict has them). `device_map`, `max_memory` and `no_split_module_classes` are those of
    `get_quantized_model_device_map`; 8-bit weights for the disk are written, quantised, to `offload_folder`. Modules that
    `skip_modules` or `keep_in_fp32_modules` name stay as they are, without `skip_modules` those of `get_keys_to_not_convert`; everything
    that is not quantised takes the config's `torch_dtype`. `offload_state_dict` has no effect: weights are mapped.

    Raises RuntimeError for an empty model without `weights_location`, ImportError where the library is absent (with bitsandbytes also a
    ValueError), CheckpointMismatch for a checkpoint that does not fit, and ValueError for a device map that cannot be.
    """
    kind = weight_format(bnb_quantization_config)
    if offload_state_dict:
        logger.info("offload_state_dict has no effect: weights are mapped, not held in memory while loading.")
    is_empty = any(tensor.is_meta for _, tensor in every_tensor(model))
    if weights_location is None:
        if is_empty:
            raise RuntimeError(
                f"{type(model).__name__} is empty (its tensors are on the meta device): give weights_location, the checkpoint to load"
            )
        logger.warning(
            "%s has its weights in memory already: building it under init_empty_weights() and giving weights_location takes less memory",
            type(model).__name__,
        )
    _say_what_is_not_there(model, kind)
    left_out = kind.left_out(model)
    homes = quantized_device_map(model, kind, left_out, device_map, max_memory, no_split_module_classes)
    check_device_map(model, homes)
    job = _job(model, kind, left_out, homes, offload_folder)
    kind.exchange(model, left_out)
    _give_rest_its_dtype(model, kind, job.few)
    with contextlib.nullcontext() if offload_folder is None else offloading_into(offload_folder):
        index = (
            _own_weights(model, kind, job)
            if weights_location is None
            else _loaded(model, kind, job, weights_location)
        )
        dispatch_model(model, homes, offload_dir=offload_folder, offload_index=index or None)
    kind.mark(model)
    return model


def _say_what_is_not_there(model: nn.Module, kind: WeightFormat) -> None:
    """A warning for names to leave out that mean nothing of this model: a typing error would quantise what shall stay."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    paths += [name for name, _ in every_tensor(model)]
    asked = dict.fromkeys([*(kind.skip_modules or ()), *kind.keep_in_fp32])
    unknown = [name for name in asked if not any(is_named(path, [name]) for path in paths)]
    if unknown:
        logger.warning(
            "%s of skip_modules and keep_in_fp32_modules names nothing of %s, and has no effect: give whole parts of a path, such as 'body.0'",
            ", ".join(map(repr, unknown)),
            type(model).__name__,
        )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is to be done: which weights get few bits, and where every tensor goes."""

    few_by_layer: Mapping[
        str, Sequence[str]
    ]  # one name a layer, with all under which a checkpoint may have it
    few: frozenset[str]  # all names of those layers
    homes: Mapping[str, Device]
    folder: str | os.PathLike[str] | None


def _job(
    model: nn.Module,
    kind: WeightFormat,
    left_out: Sequence[str],
    device_map: Mapping[str, DeviceKey],
    folder: str | os.PathLike[str] | None,
) -> _Job:
    """The plan, made before layers are exchanged, which separates what was tied. Raises ValueError for the disk without a folder."""
    names = kind.names(model, left_out)
    group_of = {name: group for group in tied_groups(model) for name in group}
    few: dict[str, Sequence[str]] = {}
    first_of: dict[nn.Module, str] = {}
    for name in names:
        first = first_of.setdefault(owner_of(model, name)[0], name)
        if first == name:
            few[name] = [name, *(other for other in group_of.get(name, ()) if other != name)]
    homes = expand_device_map(device_map, state_names(model))
    to_write = [name for name in few if homes[name] == DISK]
    if to_write and folder is None:
        raise ValueError(
            f"the device map sends {len(to_write)} weights to quantise to the disk, the first is {to_write[0]!r}: give an offload_folder for them"
        )
    return _Job(few_by_layer=few, few=frozenset(names), homes=homes, folder=folder)


def _give_rest_its_dtype(model: nn.Module, kind: WeightFormat, few: frozenset[str]) -> None:
    """What is not quantised, in the dtype that the format wants; buffers that no state dict holds keep theirs."""
    lasting = set(state_names(model))
    changed: dict[int, torch.Tensor] = {}  # ties stay
    for name, tensor in list(every_tensor(model)):
        wanted = rest_dtype(kind, name)
        if name in few or name not in lasting or wanted in (None, tensor.dtype) or not is_rest(tensor):
            continue
        if id(tensor) not in changed:
            changed[id(tensor)] = place(tensor, None, tensor.device, name=name, dtype=wanted)
        put_tensor(*owner_of(model, name), changed[id(tensor)])


def _own_weights(model: nn.Module, kind: WeightFormat, job: _Job) -> dict[str, Any]:
    """Quantise what the layers hold; the index entries of what was written."""
    index: dict[str, Any] = {}
    for name in job.few_by_layer:
        value = get_tensor(model, name)
        assert value is not None
        index.update(_bring(model, kind, job, name, value.detach(), {}))
    return index


def _loaded(
    model: nn.Module, kind: WeightFormat, job: _Job, checkpoint: str | os.PathLike[str]
) -> dict[str, Any]:
    """Load the rest, then every weight in few bits; the index entries of what is on the disk."""
    store, called = open_store(checkpoint), os.fspath(checkpoint)
    wishes = LoadWishes(offload_folder=job.folder, is_dispatched=True)
    found = _find(model, kind, job, store, called)  # first: it knows packed weights by more than their shapes
    steps, report = plan_load(model, store, job.homes, wishes, called=called)
    steps = _without(job.few, steps)
    report = _of_the_rest(report, job, store, steps, found)
    _refuse_packed(report, called)
    refuse_gaps(model, called, report)
    report = apply_steps(model, store, steps, report, wishes)
    if report.complaint():
        logger.warning("loaded %s with differences: %s", called, report.complaint())
    index: dict[str, Any] = dict(report.index)
    for name, stored in found.items():
        statistics = {local: store[entry] for local, entry in stored.statistics.items()}
        value = store[stored.values] if statistics else store.peek(stored.values)
        index.update(_bring(model, kind, job, name, value, statistics))
        if store.is_mapped(stored.values):
            give_back(value)
    return index


def _without(few: frozenset[str], steps: Sequence[Step]) -> list[Step]:
    """The steps of the rest; what was tied to a weight that gets few bits keeps its own values."""
    leaders: dict[str, str] = {}
    rest = []
    for step in steps:
        if step.name in few:
            continue
        if step.shared_with in few:
            leader = leaders.setdefault(step.shared_with, step.name)
            step = replace(step, shared_with=None if leader == step.name else leader)
        rest.append(step)
    return rest


def _bring(
    model: nn.Module,
    kind: WeightFormat,
    job: _Job,
    name: str,
    value: torch.Tensor,
    statistics: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """One weight to its place, in few bits; its index entries if that is the disk."""
    home = job.homes[name]
    if home != DISK:
        kind.put(model, name, value, statistics, canonical_device(home))
        return {}
    assert job.folder is not None
    index = kind.offload(model, name, value, statistics, job.folder)
    save_offload_index(index, job.folder)
    return index


def _find(
    model: nn.Module, kind: WeightFormat, job: _Job, store: WeightStore, called: str
) -> dict[str, Stored]:
    """Where the checkpoint has each weight, under any of its names. Raises CheckpointMismatch naming all that lack or do not fit."""
    found: dict[str, Stored] = {}
    problems = []
    for name, names in job.few_by_layer.items():
        entry = next((one for one in names if one in store), None)
        if entry is None:
            problems.append(f"it lacks {name!r}")
            continue
        found[name] = Stored(values=entry, statistics=kind.statistics_of(entry, store))
        problem = kind.check(owner_of(model, name)[0], found[name], store)
        if problem:
            problems.append(problem)
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointMismatch(f"{called} does not fit the model: {'; '.join(problems[:10])}{more}")
    return found


def _of_the_rest(
    report: LoadReport, job: _Job, store: WeightStore, steps: Sequence[Step], found: Mapping[str, Stored]
) -> LoadReport:
    """The report without the weights that are loaded here, and what belongs to them."""
    used = {entry for stored in found.values() for entry in (stored.values, *stored.statistics.values())}
    return replace(
        report,
        missing=tuple(name for name in report.missing if name not in job.few),
        unexpected=tuple(name for name in report.unexpected if name not in used),
        conflicting=find_conflicts(store, steps),
    )


def _refuse_packed(report: LoadReport, called: str) -> None:
    """Few bits of a layer that has all of them here would be taken for its values."""
    packed = [name for name in report.unexpected if is_statistics(name)]
    if packed:
        raise CheckpointMismatch(
            f"{called} holds packed weights of bitsandbytes for layers that are not quantised here, as {packed[0]!r} shows: name the same "
            "skip_modules and keep_in_fp32_modules as when it was saved"
        )
