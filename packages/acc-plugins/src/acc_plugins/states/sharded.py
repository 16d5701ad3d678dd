"""States whose tensors are spread over ranks: which part of a tensor a rank has, the whole out of the parts, and folders of shards.

[Note: three kinds of tensors] A DTensor knows its mesh; a ShardedTensor is what FSDP1 without a mesh shows of its flat parameters, in rows like a DTensor's
`Shard(0)`, and is made one here; a plain tensor is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from acc_ops.optional import require
from acc_plugins.states.part import Part
from acc_plugins.states.shards import METADATA, Box


@dataclass(frozen=True, kw_only=True)
class ShardedPart(Part):
    """A nested state of DTensors, plain tensors and plain values as folder `<name>/`, which every rank writes its shards into.

    Format: torch.distributed.checkpoint's. What is the same on all ranks is written once.
    """

    together: ClassVar[bool] = True

    def write(self, folder: str | Path, group: Any = None) -> list[str]:
        require("numpy", "writing a folder of shards")  # torch sends the plans of the ranks through it
        target = Path(folder, self.name)
        try:
            dcp.save(self.state, storage_writer=_Writer(target), process_group=group)
        except CheckpointException as error:
            raise _why(error, target) from error
        rank = dist.get_rank(group)
        own = [file.name for file in target.iterdir() if file.name.startswith(f"__{rank}_")]
        return [f"{self.name}/{file}" for file in (*sorted(own), *([METADATA] if rank == 0 else []))]


def _why(error: CheckpointException, target: Path) -> Exception:
    """What went wrong on the first rank that failed, as an error that an `except Exception` catches, which torch's is not."""
    rank, (reason, _) = min(error.failures.items())
    told = f"writing {target} failed on rank {rank}: {reason}"
    return OSError(reason.errno, told) if isinstance(reason, OSError) and reason.errno else RuntimeError(told)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but the folder's name stays out of its files: a checkpoint is renamed when it is whole."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return torch.Size(tensor.metadata().size) if isinstance(tensor, ShardedTensor) else tensor.shape


def has_sharded(module: nn.Module) -> bool:
    """Whether a weight of the module is a DTensor."""
    return any(isinstance(p, DTensor) for p in (*module.parameters(), *module.buffers()))


def local_pieces(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """What this rank has of a tensor: slices of the whole, and the memory of each, which may be written to."""
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor
    elif isinstance(tensor, DTensor):
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()
        if local.numel():
            yield (tuple(chunk.offsets), tuple(chunk.sizes)), local
    else:
        yield ((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on the device that its ranks speak through. Every rank of its mesh must call it."""
    if not isinstance(tensor, DTensor):
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
        return _in_rows(tensor, meshes) if isinstance(tensor, ShardedTensor) else tensor

    converted: dict[str, Any] = map_tensors(convert, state)
    return converted


def _in_rows(tensor: ShardedTensor, meshes: dict[int, DeviceMesh]) -> DTensor:
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
