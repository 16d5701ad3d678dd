"""What loading a checkpoint will do to each tensor of a model, decided and checked before anything is touched."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from acc_bigmodel.device_map import state_names
from acc_bigmodel.measure import modules_in_order
from acc_bigmodel.placement import CPU, DISK, Device
from acc_bigmodel.quantized import is_8bit
from acc_bigmodel.stores.dtypes import dtype_named
from acc_bigmodel.stores.folder import same_bytes, statistics_of
from acc_bigmodel.stores.pieces import give_back
from acc_bigmodel.stores.store import WeightStore
from acc_hooks.tensors import is_plain
from acc_hooks.ties import every_tensor, tied_groups
from acc_ops.options import closest

_EXTRA_STATE = "_extra_state"  # what torch.nn.Module.state_dict calls it


class CheckpointMismatch(ValueError, RuntimeError):
    """A checkpoint and a model do not fit; the message names the tensors."""


@dataclass(frozen=True, kw_only=True)
class LoadWishes:
    """How the user wants a checkpoint to be loaded."""

    dtype: str | torch.dtype | None = None
    keep_in_fp32: tuple[str, ...] = ()
    offload_buffers: bool = False
    offload_folder: str | os.PathLike[str] | None = None
    quantise_8bit: bool = False  # on the way to the disk, what bitsandbytes' parameters would quantise
    is_dispatched: bool = False  # hooks follow, which know ties and give each device its copy of one


@dataclass(frozen=True, kw_only=True)
class Step:
    """One tensor to load: under which name it is stored, where it goes (None: where it is), and in which dtype."""

    name: str
    source: str
    home: Device | None
    dtype: torch.dtype
    shared_with: str | None = None  # the name of another step, whose tensor this name gets
    is_quantised: bool = False  # to 8 bits, on the way to the disk
    statistics: str | None = None  # under which name those of a stored 8-bit weight are stored


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    `loaded` has every name with its device (None: it stayed where the model had it); `missing` are names of the model
    that the checkpoint lacks, `unexpected` the other way round; `cast` changed their dtype; `tied` came under another name
    of the same tensor; `conflicting` are tied names for which the checkpoint has a value of their own that differs from the
    one used; `skipped` are entries of the checkpoint that are no tensors, and for which the model has no use. `where` says
    where each loaded tensor is now: on which device, or in which file. `index` is the offload index of the latter, for which
    `written_bytes` had to be written.
    """

    loaded: dict[str, Device | None]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    conflicting: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    where: dict[str, str] = field(default_factory=dict)
    index: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    written_bytes: int = 0

    def complaint(self) -> str:
        """The names that have no counterpart, with the closest ones, in one sentence each."""
        lines = []
        if self.missing:
            lines.append(f"it lacks {named(self.missing, self.unexpected)}")
        if self.unexpected:
            lines.append(f"the model has no {named(self.unexpected, self.missing)}")
        if self.conflicting:
            lines.append(
                f"the model ties {named(self.conflicting, ())} to another name whose value differs, and which is used"
            )
        if self.skipped:
            lines.append(f"its entries {named(self.skipped, ())} are no tensors")
        return "; ".join(lines)


def plan_load(
    model: nn.Module,
    store: WeightStore,
    homes: Mapping[str, Device] | None,
    wishes: LoadWishes,
    *,
    called: str = "the checkpoint",
    same_shapes: bool = True,
) -> tuple[list[Step], LoadReport]:
    """The steps that load `store` into `model`, and the report so far. Reads no tensor, changes nothing.

    `homes` are the devices by tensor name; None leaves every tensor on its device. Raises CheckpointMismatch for shapes
    (unless they need not be the `same_shapes`) and kinds of numbers that do not fit, naming every such tensor, and the
    checkpoint as it is `called`.
    """
    tensors = dict(every_tensor(model))
    names = state_names(model)
    buffers = buffer_names(model)
    wanted = None if wishes.dtype is None else dtype_named(wishes.dtype)
    if wanted is not None and not _is_floating(wanted):
        raise ValueError(
            f"dtype={wanted} would cut the fractions off floating weights: give a floating dtype, or quantise the model"
        )
    group_of = {name: group for group in tied_groups(model) for name in group}
    steps: list[Step] = []
    missing, tied, cast, wrong = [], [], [], []
    for name in names:
        group = group_of.get(name, [name])
        source = name if name in store else next((other for other in group if other in store), None)
        if source is None:
            missing.append(name)
            continue
        tensor = tensors[name]
        dtype = _dtype_for(name, tensor, store.dtype(source), wanted, wishes.keep_in_fp32)
        problem = _problem(name, tensor, store, source, same_shapes, dtype)
        if problem:
            wrong.append(problem)
            continue
        home = None if homes is None else homes[name]
        if home == DISK and name in buffers and not wishes.offload_buffers:
            home = CPU
        step = Step(name=name, source=source, home=home, dtype=dtype)
        if home == DISK and is_8bit(tensor):
            step = _in_8_bits(step, store, wishes)
        steps.append(step)
        if source != name:
            tied.append(name)
        if step.dtype != store.dtype(source):
            cast.append(name)
    if wrong:
        raise CheckpointMismatch(f"{called} does not fit the model: {'; '.join(wrong[:10])}")
    steps = _shared(steps, group_of, wishes.is_dispatched)
    extra = extra_states(model)
    known = {*names, *extra, *(step.statistics for step in steps)}
    held = {*store, *store.others}
    report = LoadReport(
        loaded={step.name: step.home for step in steps},
        missing=(*missing, *(name for name in extra if name not in held)),
        unexpected=tuple(name for name in store if name not in known),
        skipped=tuple(name for name in store.others if name not in extra),
        cast=tuple(cast),
        tied=tuple(tied),
    )
    return steps, report


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep more than tensors (`get_extra_state`), by the name of that entry in the state dict."""
    return {
        f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE: module
        for path, module in modules_in_order(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def buffer_names(model: nn.Module) -> set[str]:
    """The names of all buffers, each of those that a shared one has."""
    return {name for name, _ in model.named_buffers(remove_duplicate=False)}


def named(names: Sequence[str], candidates: Sequence[str] = ()) -> str:
    """The first five names, with those of the `candidates` that are meant, and how many more there are."""
    shown = []
    for name in names[:5]:
        near = closest(name, candidates)
        shown.append(f"{name!r}" + (f" (is {near!r} meant?)" if near else ""))
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def find_conflicts(store: WeightStore, steps: Sequence[Step]) -> tuple[str, ...]:
    """The names that share another's tensor although `store` has a different value for them. Reads those two."""
    by_name = {step.name: step for step in steps}
    found = []
    for step in steps:
        leader = by_name[step.shared_with].source if step.shared_with is not None else step.source
        if store.alias_of(step.source) != store.alias_of(leader) and not _equal(store, step.source, leader):
            found.append(step.name)
    return tuple(found)


def _equal(store: WeightStore, name: str, other: str) -> bool:
    if store.shape(name) != store.shape(other):
        return False
    one, two = store.peek(name), store.peek(other)
    widest = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    equal = same_bytes(one, two) or (one.dtype != two.dtype and torch.equal(one.to(widest), two.to(widest)))
    for key, tensor in ((name, one), (other, two)):
        if store.is_mapped(key):
            give_back(tensor)
    return equal


def _shared(steps: list[Step], group_of: Mapping[str, list[str]], over_devices: bool) -> list[Step]:
    """Let tied names on one device share a tensor, and a name on the disk the tensor that is in memory anyway.

    With `over_devices` names on several devices share one too.
    """
    first: dict[tuple[str, Device | None], str] = {}
    in_memory: dict[str, str] = {}
    for step in steps:
        tie = group_of.get(step.name, [step.name])[0]
        first.setdefault((tie, step.home), step.name)
        if step.home != DISK:
            in_memory.setdefault(tie, step.name)
    result = []
    for step in steps:
        tie = group_of.get(step.name, [step.name])[0]
        leader = first[tie, step.home]
        if step.home == DISK or over_devices:
            leader = in_memory.get(tie, leader)
        result.append(step if leader == step.name else replace(step, shared_with=leader))
    return result


def _problem(
    name: str, tensor: torch.Tensor, store: WeightStore, source: str, same_shapes: bool, wanted: torch.dtype
) -> str | None:
    """Why a stored tensor cannot become, in the dtype that is `wanted`, the one of the model; None if it can."""
    shape, dtype = store.shape(source), store.dtype(source)
    if same_shapes and shape != tensor.shape and type(tensor).__name__ != "Params4bit":
        return (
            f"{name!r} has the shape {tuple(shape)} in the checkpoint and {tuple(tensor.shape)} in the model"
        )
    cuts = _is_floating(dtype) and not _is_floating(tensor.dtype)  # fractions
    cuts = cuts or (dtype.is_complex and not tensor.dtype.is_complex)  # imaginary parts
    if cuts and is_plain(tensor):
        return f"{name!r} is {dtype} in the checkpoint and {tensor.dtype} in the model"
    if not _is_convertible(dtype, wanted):
        return f"{name!r} is {dtype} in the checkpoint, which torch cannot convert to {wanted}"
    return None


@functools.cache
def _is_convertible(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch converts the one into the other; a tensor without elements would convert in any case."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(to)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _in_8_bits(step: Step, store: WeightStore, wishes: LoadWishes) -> Step:
    """The step of an 8-bit weight to the disk: one stored in 8 bits brings its statistics, another is quantised if wished."""
    if step.dtype.is_floating_point:
        return replace(step, dtype=torch.int8, is_quantised=True) if wishes.quantise_8bit else step
    statistics = statistics_of(step.source)
    if statistics not in store:
        raise CheckpointMismatch(
            f"{step.source!r} is {step.dtype} in the checkpoint, which lacks {statistics!r}, the statistics of an 8-bit weight"
        )
    return replace(step, statistics=statistics)


def _dtype_for(
    name: str,
    tensor: torch.Tensor,
    stored: torch.dtype,
    wanted: torch.dtype | None,
    keep_in_fp32: tuple[str, ...],
) -> torch.dtype:
    if not is_plain(tensor):
        return stored  # its class converts
    if not _is_floating(stored):
        return stored if wanted is not None else tensor.dtype
    if wanted is None or tensor.dtype.is_complex:
        return tensor.dtype
    if wanted == torch.float16 and any(
        part in f".{name}." for part in (f".{kept}." for kept in keep_in_fp32)
    ):
        return torch.float32
    return wanted


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
