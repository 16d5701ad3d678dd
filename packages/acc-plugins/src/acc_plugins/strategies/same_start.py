"""The same weights on every rank before they are sharded: those of rank 0, also where only rank 0 has read them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acc_hooks.ties import replace_tensors, shared_parameters, tie_again
from acc_ops.exchange import tried
from acc_ops.world import World
from acc_plugins.strategies.agreement import check_agreement, model_facts

logger = logging.getLogger(__name__)
_SMALL_BYTES, _TOGETHER = 64 * 1024, 256  # a tensor that is not sent alone, and how many of those go together


def tie_what_is_empty(model: nn.Module) -> None:
    """Tie the weights of a model that lies on the meta device, where it says how: transformers' may have been built without their ties."""
    retie = getattr(model, "tie_weights", None)
    if callable(retie) and any(p.is_meta for p in model.parameters()):
        retie()


def must_be_sent(model: nn.Module, world: World, plan: Sequence[str], error: Exception | None) -> bool:
    """Whether some rank has no values for some weight, so that rank 0's must be sent. Every rank calls it, before anything is changed.

    `plan` is what this rank is about to do, `error` why it cannot, which every rank raises then, as it does what the model's `tie_weights` raises
    on one. Raises a ValueError on every rank when the ranks built different models or plan to do different things, and when nobody has values
    for a weight.
    """
    _, not_tied = tried(lambda: tie_what_is_empty(model))
    every = itertools.chain(model.named_parameters(), model.named_buffers())
    missing = any(tensor.is_meta for _, tensor in every)
    stuck = _cannot_start(model) if missing and world.is_main else None
    error = not_tied if error is None else error
    check_agreement(world.comm, {"the strategy": "fsdp2"}, [model_facts(model, [])], error=error)
    mine = (list(plan), stuck, missing)
    told = [mine] if world.size == 1 else world.comm.all_gather_object(mine)
    for rank, (planned, _, _) in enumerate(told):
        if planned != told[0][0]:
            odd = sorted(set(planned) ^ set(told[0][0]))
            raise ValueError(
                f"rank 0 and rank {rank} would shard {type(model).__name__} differently ({', '.join(odd[:5])}): give all ranks the same options"
            )
    if told[0][1] is not None:
        raise ValueError(
            f"{told[0][1]} of {type(model).__name__} is on the meta device on rank 0, so nobody has its values, and its module has no "
            "reset_parameters() to make them: load the weights on rank 0 before prepare (the other ranks may stay on meta)"
        )
    return any(empty for *_, empty in told)


def _cannot_start(model: nn.Module) -> str | None:
    """A tensor on the meta device whose module cannot give it values."""
    for prefix, module in model.named_modules():
        empty = _own_meta(module)
        if empty and not callable(getattr(module, "reset_parameters", None)):
            return f"{prefix}.{empty[0]}".lstrip(".")
    return None


def started(model: nn.Module) -> None:
    """Give what is on the meta device values on the CPU: those with which its modules begin. Ties hold."""
    ties = shared_parameters(model)
    for module in model.modules():
        if _own_meta(module):
            logger.warning("%s begins with new values: it was on the meta device", type(module).__name__)
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]
    for places in ties:
        tie_again(places)


def _own_meta(module: nn.Module) -> list[str]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, tensor in own if tensor is not None and tensor.is_meta]


def send_from_rank_0(tensors: Iterable[Tensor], world: World) -> None:
    """Write rank 0's values into the same tensors of every rank: large ones as they are, small ones many at a time."""
    if world.size == 1:
        return
    with torch.no_grad():
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            values = tensor.detach()
            if values.numel() * values.element_size() < _SMALL_BYTES:
                small.setdefault(values.dtype, []).append(values)
            elif values.device == world.device and values.is_contiguous():
                world.comm.broadcast(values, 0)
            else:
                values.copy_(world.comm.broadcast(values.to(world.device).contiguous(), 0))
        for group in small.values():
            for at in range(0, len(group), _TOGETHER):
                _send_together(group[at : at + _TOGETHER], world)


def _send_together(tensors: list[Tensor], world: World) -> None:
    flat = torch.cat([t.to(world.device).reshape(-1) for t in tensors])
    world.comm.broadcast(flat, 0)
    if not world.is_main:
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def emptied(model: nn.Module) -> dict[str, Tensor]:
    """Put `model` on the meta device, ties and all; the values it had, by name."""
    values = {
        name: tensor.detach()
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if not tensor.is_meta
    }
    replace_tensors(model, lambda tensor: tensor if tensor.is_meta else _on_meta(tensor))
    return values


def filled(model: nn.Module, values: Mapping[str, Tensor], world: World, device: torch.device) -> None:
    """Give every tensor of `model` memory on `device` (buffers: on the world's), and rank 0's `values`, of which every rank keeps its part."""
    made: dict[int, Any] = {}
    for name, p in model.named_parameters():
        new = nn.Parameter(
            shard_from_rank_0(values.get(name), p, world, device), requires_grad=p.requires_grad
        )
        vars(new).update(vars(p))
        made[id(p)] = new
    for name, buffer in model.named_buffers():
        made[id(buffer)] = shard_from_rank_0(values.get(name), buffer, world, world.device)
    replace_tensors(model, lambda tensor: made[id(tensor)])


def shard_from_rank_0(value: Tensor | None, like: Tensor, world: World, device: torch.device) -> Tensor:
    """The whole `value` that rank 0 has, laid out as `like`: this rank's part of it, or all where `like` is no DTensor. Every rank calls it."""
    if world.is_main:
        assert value is not None
        whole = value.detach().to(world.device, like.dtype).contiguous()
    else:
        whole = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    if world.size > 1:
        world.comm.broadcast(whole, 0)
    if hasattr(like, "placements"):
        return sharded_like(whole, like, device)
    return whole.to(device, copy=whole is value)


def local_piece(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of `whole`, laid out as the DTensor `like`; a view."""
    from torch.distributed.tensor import _utils  # noqa: PLC0415  half a second, where something is sharded

    shape, offset = _utils.compute_local_shape_and_global_offset(
        whole.shape, like.device_mesh, like.placements
    )
    piece = whole
    for axis, (start, length) in enumerate(zip(offset, shape, strict=True)):
        piece = piece.narrow(axis, min(start, whole.shape[axis]), length)
    return piece


def sharded_like(whole: Tensor, like: Any, device: torch.device | None = None) -> Tensor:
    """`whole`, which every rank has, as a DTensor that is laid out as `like`; its part is a copy."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  half a second, where something is sharded

    local = local_piece(whole, like).to(device or whole.device, copy=True).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
