"""Tensors that are spread over ranks: which part of one a rank has, and the whole out of the parts.

[Note: three kinds of tensors] A DTensor knows its mesh; a ShardedTensor is what FSDP1 without a mesh shows of its flat parameters, in rows like a DTensor's
`Shard(0)`, and is made one here; a plain tensor is whole on every rank. None of this loads torch's modules for them: a tensor of theirs has them loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from acc_plugins.states.shards import Box


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a tensor that lies on a mesh."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def is_sharded_tensor(tensor: object) -> TypeGuard[ShardedTensor]:
    """Whether it is one of FSDP1's."""
    return _is(tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return torch.Size(tensor.metadata().size) if is_sharded_tensor(tensor) else tensor.shape


def has_sharded(module: nn.Module) -> bool:
    """Whether a weight of the module is a DTensor."""
    return any(is_dtensor(p) for p in (*module.parameters(), *module.buffers()))


def local_pieces(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """What this rank has of a tensor: slices of the whole, and the memory of each, which may be written to."""
    if is_sharded_tensor(tensor):
        for shard in tensor.local_shards():
            yield (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor
    elif is_dtensor(tensor):
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()
        if local.numel():
            yield (tuple(chunk.offsets), tuple(chunk.sizes)), local
    else:
        yield ((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on the device that its ranks speak through. Every rank of its mesh must call it."""
    if not is_dtensor(tensor):
        return tensor
    spread: Any = tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # its shards wait in CPU memory
        spread = tensor.to(tensor.device_mesh.device_type)
    full: Tensor = spread.full_tensor()
    return full


def gathered(state: Any, keep: bool) -> Any:
    """The nested `state` with whole tensors on the CPU; None on ranks that do not `keep` it. Every rank must call it.

    One tensor at a time is whole on ranks that keep nothing. Tensors that are one parameter stay one.
    """
    done: dict[int, Tensor | None] = {}

    def gather(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in done:
            full = whole(tensor).detach()
            done[id(tensor)] = full.cpu() if keep else None
        return done[id(tensor)]

    result = map_tensors(gather, state)
    return result if keep else None


def map_tensors(function: Callable[[Tensor], Any], state: Any) -> Any:
    """The nested `state` with `function` of every tensor in its place."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, Mapping):
        return {key: map_tensors(function, value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map_tensors(function, value) for value in state)
    return state


def as_dtensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The nested `state` with every ShardedTensor made a DTensor of the same memory."""
    meshes: dict[int, DeviceMesh] = {}

    def convert(tensor: Tensor) -> Tensor:
        return _in_rows(tensor, meshes) if is_sharded_tensor(tensor) else tensor

    converted: dict[str, Any] = map_tensors(convert, state)
    return converted


def _in_rows(tensor: ShardedTensor, meshes: dict[int, DeviceMesh]) -> DTensor:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  whoever has such a tensor has it loaded
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    group = tensor._process_group  # torch shows it nowhere else
    shape = shape_of(tensor)
    shards = tensor.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, *shape[1:], dtype=tensor.dtype)
    if id(group) not in meshes:
        meshes[id(group)] = DeviceMesh.from_group(group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, meshes[id(group)], [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _is(tensor: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(tensor, getattr(loaded, name, ()))
