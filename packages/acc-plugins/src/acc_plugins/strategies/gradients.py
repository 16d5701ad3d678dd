"""Where a rank's gradients lie between two micro-batches, so that a checkpoint inside an accumulation window can take them and give them back.

[Note: three kinds of places] Most gradients are a parameter's `grad`. What FSDP2 does not exchange in a window stays whole in its units, where no
parameter shows it (`HeldByFSDP2`, `PartlyReduced`); FSDP1 has gradients of its flat parameters (`flat_gradients.py`).
A gradient is saved as the tensor that this rank holds. One that lies over a mesh in another way than its parameter says how, so that it goes on
being added up in the same order.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acc_ops.world import World
from acc_plugins.states.names import plain_name
from acc_plugins.states.spread import is_dtensor
from acc_plugins.support import UnsupportedError

Saved = Any  # a tensor, or {"part": a tensor, "placements": how a mesh holds it}
_TEXT = re.compile(r"(?P<kind>[SRP])(?P<what>.*)")


class GradientPlace:
    """A place for one gradient of this rank. `parameters`: whose it is."""

    parameters: Sequence[Tensor] = ()

    def take(self) -> Saved | None:
        """The gradient as it is, the memory itself; None where there is none."""
        raise NotImplementedError

    def give(self, saved: Saved | None) -> None:
        """Put a copy of `saved`, or nothing, in the place of what is there."""
        raise NotImplementedError

    def misfit(self, saved: Saved) -> str | None:
        """What this place holds, when `saved` is no such thing."""
        raise NotImplementedError

    def own_part(self) -> Tensor | None:
        """What this rank holds back whole and nobody averaged, or None: the tensor itself, of which torch counts the changes."""
        return None

    def to_average(self) -> Tensor | None:
        """`own_part` as all ranks that average it have it: plain, of the same shape, in the parameter's dtype."""
        raise NotImplementedError

    def nothing(self) -> Tensor:
        """Zeros like `to_average`, for a rank that has none."""
        raise NotImplementedError

    def take_average(self, average: Tensor) -> None:
        """Add this rank's part of the average to what the optimizer finds; nothing is held back any more."""
        raise NotImplementedError

    def scale(self, factor: float) -> None:
        """Multiply what is there."""
        saved = self.take()
        if saved is not None:
            (saved["part"] if isinstance(saved, Mapping) else saved).mul_(factor)


class OfParameter(GradientPlace):
    """The `grad` of a parameter. One that is there is overwritten: it may be a view of a DDP bucket."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameters = (parameter,)
        self._parameter: Any = parameter

    def take(self) -> Saved | None:
        gradient = self._parameter.grad
        return None if gradient is None else packed(gradient, _placements(self._parameter))

    def give(self, saved: Saved | None) -> None:
        parameter = self._parameter
        if saved is None:
            parameter.grad = None
        elif isinstance(saved, Tensor) and not is_dtensor(parameter) and _overwrites(parameter.grad, saved):
            parameter.grad.detach().copy_(saved)
        else:
            like = parameter if is_dtensor(parameter) else None
            parameter.grad = unpacked(saved, parameter.device, parameter.dtype, like)

    def misfit(self, saved: Saved) -> str | None:
        local = self._parameter.to_local() if is_dtensor(self._parameter) else self._parameter
        return misfit_of(saved, [tuple(local.shape)])


class HeldByFSDP2(GradientPlace):
    """What a unit of `fully_shard` holds back of one parameter: the whole gradient of this rank, averaged with nobody's."""

    def __init__(self, unit: Any) -> None:
        self.parameters = (unit.sharded_param,)
        self._unit = unit
        self._spec: Any = getattr(unit, "_unsharded_dtensor_spec", None) or getattr(unit, "_tp_spec", None)
        if unit.is_dtensor and self._spec is None:
            raise AttributeError("how a mesh holds a gathered parameter")

    def own_part(self) -> Tensor | None:
        unit = self._unit
        held: Tensor | None = unit.unsharded_accumulated_grad
        return getattr(getattr(unit, "_unsharded_param", None), "grad", None) if held is None else held

    def take(self) -> Saved | None:
        held = self.own_part()
        if held is None:
            return None
        return packed(held, self._spec.placements if self._spec is not None else None)

    @torch.no_grad()
    def to_average(self) -> Tensor | None:
        held: Any = self.own_part()
        if held is None:
            return None
        if is_dtensor(held):  # on the ranks that have other parts of the same layer
            held = _local(held.redistribute(placements=self._spec.placements))
        made: Tensor = held.detach().to(self._unit.device, self._unit.sharded_param.dtype)
        return made

    def nothing(self) -> Tensor:
        unit = self._unit
        return torch.zeros(unit._orig_size, dtype=unit.sharded_param.dtype, device=unit.device)

    @torch.no_grad()
    def take_average(self, average: Tensor) -> None:
        """The shard as `fully_shard` cuts it: chunks, of which the last ranks may have none."""
        self.give(None)
        unit, parameter = self._unit, self._unit.sharded_param
        rank, dim = unit.mesh_info.shard_mesh_rank, unit.fsdp_placement.dim
        chunks = average.chunk(unit.mesh_info.shard_mesh_size, dim)
        part = chunks[rank] if rank < len(chunks) else average.narrow(dim, 0, 0)
        gradient = unit.to_sharded_dtensor(part.contiguous().to(parameter.device))
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def give(self, saved: Saved | None) -> None:
        """torch adds the next gradient to what it has accumulated, and exchanges that of parameters which were gathered in this process."""
        unit = self._unit
        if hasattr(unit, "_unsharded_param"):
            unit._unsharded_param.grad = None
        like = None if self._spec is None else _Like(self._spec)
        unit.unsharded_accumulated_grad = None if saved is None else unpacked(saved, unit.device, None, like)

    def misfit(self, saved: Saved) -> str | None:
        return misfit_of(saved, [tuple(self._unit._orig_size)])


class PartlyReduced(GradientPlace):
    """What a group of replicas has added up among its shards and not yet among its copies (`set_requires_all_reduce(False)`)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def take(self) -> Saved | None:
        return self._group._partial_reduce_output

    def give(self, saved: Saved | None) -> None:
        self._group._partial_reduce_output = (
            None if saved is None else unpacked(saved, self._group.device, None, None)
        )

    def misfit(self, saved: Saved) -> str | None:  # noqa: ARG002  its size is known when torch makes it
        return None


Places = dict[str, GradientPlace]


def of_parameters(module: nn.Module) -> Places:
    """The places of a module's parameters, by their names without those of wrappers."""
    return {plain_name(name): OfParameter(parameter) for name, parameter in module.named_parameters()}


def held_by_fsdp2(module: nn.Module) -> Places:
    """What the units of a sharded module can hold back. UnsupportedError for a torch that keeps it elsewhere."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    places: Places = {
        f"{names[id(place.parameters[0])]} (held back)": place for place in held_in_units(module)
    }
    with known_to_us("the gradients that FSDP2 holds back"):
        for number, group in enumerate(_groups(module)):
            places[f"unit {number} (partly reduced)"] = PartlyReduced(group)
        for place in places.values():
            place.take()
    return places


def held_in_units(module: nn.Module) -> list[HeldByFSDP2]:
    """The places of single parameters among them, in an order that is the same on every rank. UnsupportedError as above."""
    with known_to_us("the gradients that FSDP2 holds back"):
        return [HeldByFSDP2(unit) for group in _groups(module) for unit in group.fsdp_params]


def exchange(world: World, places: Iterable[GradientPlace]) -> None:
    """Average over the ranks of `world` what is held back in `places`, the same ones on each: one collective for each, so that little more memory is
    needed. What only some ranks have counts as zero on the others."""
    listed = list(places)
    found = torch.tensor([place.own_part() is not None for place in listed], dtype=torch.int32)
    on_ranks = world.comm.all_reduce(found.to(world.comm.control_device)).tolist()
    for place, count in zip(listed, on_ranks, strict=True):
        if count:
            own = place.to_average()
            together = (place.nothing() if own is None else own.clone()).contiguous()
            place.take_average(world.comm.all_reduce(together).div_(world.size))


@contextmanager
def known_to_us(what: str) -> Iterator[None]:
    """UnsupportedError for a torch whose private attributes are others."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} keeps {what} in a place that is not known here ({error})"
        ) from error


@torch.no_grad()  # so that a DTensor shows its own memory
def packed(gradient: Any, placements: Sequence[Any] | None) -> Saved:
    """What this rank holds of it, and how a mesh holds it where that is not by `placements`."""
    gradient = gradient.detach()
    if not is_dtensor(gradient):
        return gradient
    if placements is not None and tuple(gradient.placements) != tuple(placements):
        texts = [_text(one) for one in gradient.placements]
        if None not in texts:
            return {"part": _local(gradient), "placements": texts}
        gradient = gradient.redistribute(placements=placements)  # the same sum, in another order
    return _local(gradient)


@torch.no_grad()
def unpacked(saved: Saved, device: torch.device, dtype: torch.dtype | None, like: Any) -> Tensor:
    """A gradient of its own again; `like`: a DTensor of the same shape and mesh where it is one."""
    part = saved["part"] if isinstance(saved, Mapping) else saved
    local: Tensor = part.to(device, dtype or part.dtype, copy=True)
    if like is None:
        return local
    placements = (
        [_placement(text) for text in saved["placements"]] if isinstance(saved, Mapping) else like.placements
    )
    made: Tensor = importlib.import_module("torch.distributed.tensor").DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


class _Like:
    """A DTensor that is not there now, as torch describes it."""

    def __init__(self, spec: Any) -> None:
        self.device_mesh, self.placements = spec.mesh, spec.placements
        self.shape, self._stride = spec.tensor_meta.shape, spec.tensor_meta.stride

    def stride(self) -> tuple[int, ...]:
        return tuple(self._stride)


def _groups(module: nn.Module) -> Iterator[Any]:
    """The groups of parameters that torch gathers together, each once."""
    seen: set[int] = set()
    fsdp = importlib.import_module("torch.distributed.fsdp")
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def _overwrites(present: Tensor | None, gradient: Tensor) -> bool:
    return present is not None and present.layout == gradient.layout == torch.strided


def misfit_of(saved: Saved, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if isinstance(saved, Mapping):  # its part has a shape of its own
        return None
    return None if tuple(saved.shape) in shapes else f"one of shape {' or '.join(map(str, shapes))}"


def _placements(parameter: Any) -> Sequence[Any] | None:
    return parameter.placements if is_dtensor(parameter) else None


def _local(gradient: Any) -> Tensor:
    local = gradient.to_local()
    made: Tensor = local.wait() if hasattr(local, "wait") else local  # a result that is still on its way
    return made


def _text(placement: Any) -> str | None:
    """`S1`, `R`, `Psum`; None for a placement that is more than that."""
    kinds = importlib.import_module("torch.distributed.tensor")
    if type(placement) is kinds.Shard:
        return f"S{placement.dim}"
    if type(placement) is kinds.Replicate:
        return "R"
    return f"P{placement.reduce_op}" if type(placement) is kinds.Partial else None


def _placement(text: str) -> Any:
    kinds = importlib.import_module("torch.distributed.tensor")
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"a saved gradient lies over the mesh in a way that is not known: {text!r}")
    what = found["what"]
    return {"S": lambda: kinds.Shard(int(what)), "R": kinds.Replicate, "P": lambda: kinds.Partial(what)}[
        found["kind"]
    ]()
