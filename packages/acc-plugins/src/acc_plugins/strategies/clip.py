"""Gradient clipping: torch's formula, over plain gradients, DTensors of any meshes, and both together.

[Note: the norm of shards] A norm is a sum of powers, and the shards of a gradient are disjoint parts of that sum. So every rank sums its own shards, the
ranks that share a gradient add up what they have along the axes it is sharded on, and the sums of all groups of gradients make one norm.
Along an axis on which a gradient is replicated all have the same, which counts once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acc_plugins.states.spread import is_dtensor

_Place = tuple[Any, tuple[int, ...]]  # a mesh, and its axes along which a gradient is sharded


def clip_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm before that, as a 0-dim tensor.

    The same numbers as `torch.nn.utils.clip_grad_norm_`, except that a parameter given twice counts once. Gradients that are plain
    tensors of one device and dtype are grouped once here and not twice as there; DTensors may lie on several meshes, beside plain ones. Every
    rank of those meshes calls it. Raises ValueError for a norm that shards cannot be summed for.
    """
    norm_type = float(norm_type)  # "inf", too, as torch takes it
    unique = unique_parameters(parameters)
    gradients = [p.grad for p in unique if p.grad is not None]
    if not gradients or not _alike_and_plain(gradients):
        if any(is_dtensor(g) for g in gradients):
            return _clip_shards(gradients, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(unique, max_norm, norm_type)
    with torch.no_grad():
        norms = torch._foreach_norm(gradients, norm_type)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def clip_parts(
    parts: Mapping[Any, list[Tensor]], max_norm: float, norm_type: float | str, device: torch.device
) -> Tensor:
    """The same for plain gradients of which each rank has a part: process group -> what its ranks share; whole ones are under None.

    Every rank calls it, with the same groups in the same order.
    """
    norm_type = float(norm_type)
    with torch.no_grad():
        norms = [_norm_of_parts(gradients, group, norm_type, device) for group, gradients in parts.items()]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradients in parts.values():
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return total


def clip_value(parameters: Tensor | Iterable[Tensor], limit: float) -> None:
    """Limit every element of the gradients to [-limit, limit], as `torch.nn.utils.clip_grad_value_` does; DTensors and plain ones may be mixed."""
    unique = unique_parameters(parameters)
    gradients = [p.grad for p in unique if p.grad is not None]
    if any(is_dtensor(g) for g in gradients):
        with torch.no_grad():
            for local in map(local_part, gradients):
                local.clamp_(-float(limit), float(limit))
    elif gradients:  # torch fails without any
        torch.nn.utils.clip_grad_value_(unique, limit)


def unique_parameters(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters (one, or any iterable such as a generator) as a list, each once, in order."""
    if isinstance(parameters, Tensor):
        return [parameters]
    return list({id(p): p for p in parameters}.values())


def _alike_and_plain(gradients: list[Tensor]) -> bool:
    """Whether all are dense tensors of torch's own class with one device and one dtype."""
    device, dtype = gradients[0].device, gradients[0].dtype
    return all(
        type(g) is Tensor and g.device == device and g.dtype == dtype and g.layout is torch.strided
        for g in gradients
    )


def _clip_shards(gradients: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    if math.isnan(norm_type) or norm_type <= 0:
        raise ValueError(f"the norm_type of sharded gradients must be positive or inf, got {norm_type}")
    with torch.no_grad():
        groups: dict[_Place, list[Tensor]] = {}
        for gradient in map(_summed, gradients):
            groups.setdefault(_place_of(gradient), []).append(local_part(gradient))
        locals_ = [local_part(gradient) for gradient in gradients]
        wide = torch.float64 if any(g.dtype is torch.float64 for g in locals_) else torch.float32
        norms = [_norm_of(group, place, norm_type, wide) for place, group in groups.items()]
        total = torch.linalg.vector_norm(torch.stack([n.to(locals_[0].device) for n in norms]), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for device in dict.fromkeys(local.device for local in locals_):
            torch._foreach_mul_([local for local in locals_ if local.device == device], factor.to(device))
    return total


def local_part(tensor: Any) -> Tensor:
    """What this rank holds of it: the memory itself, so that writing there writes to the DTensor."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def _summed(gradient: Any) -> Tensor:
    """The gradient without partial sums, which have no norm of their own; scaling the partial sums scales it, too."""
    if is_dtensor(gradient) and any(place.is_partial() for place in gradient.placements):
        replicate = importlib.import_module("torch.distributed.tensor").Replicate()
        places = [replicate if place.is_partial() else place for place in gradient.placements]
        gradient = gradient.redistribute(placements=places)
    found: Tensor = gradient
    return found


def _place_of(gradient: Any) -> _Place:
    if not is_dtensor(gradient):
        return None, ()
    return gradient.device_mesh, tuple(
        axis for axis, place in enumerate(gradient.placements) if not place.is_replicate()
    )


def _norm_of(group: list[Tensor], place: _Place, norm_type: float, wide: torch.dtype) -> Tensor:
    """The norm of all gradients of a group, over all ranks that share them."""
    mesh, axes = place
    parts = [g.abs() if g.is_complex() else g for g in group if g.numel()]
    device = group[0].device if mesh is None else torch.device(mesh.device_type)
    norms = [n.to(device, wide) for n in torch._foreach_norm(parts, norm_type, dtype=wide)] if parts else []
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=wide)
    total = total.to(device)
    infinite = math.isinf(norm_type)
    power = total if infinite or not axes else total**norm_type
    for axis in axes:
        dist.all_reduce(power, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, mesh.get_group(axis))
    return power if infinite or not axes else power ** (1 / norm_type)


def _norm_of_parts(gradients: list[Tensor], group: Any, norm_type: float, device: torch.device) -> Tensor:
    """Over the ranks of `group`, in float32 at least."""
    real = [g.abs() if g.is_complex() else g for g in gradients if g.numel()]  # of ignored modules
    wide = [g if g.dtype == torch.float64 else g.float() for g in real]
    kind = torch.float64 if any(g.dtype == torch.float64 for g in wide) else torch.float32
    norm = torch.zeros((), dtype=kind, device=device)
    if wide:
        norms = [torch.linalg.vector_norm(g, norm_type).to(norm) for g in wide]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if group is None:
        return norm
    norm = norm.double() if device.type == "cpu" else norm
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    summed = norm**norm_type
    dist.all_reduce(summed, group=group)
    return summed ** (1.0 / norm_type)
