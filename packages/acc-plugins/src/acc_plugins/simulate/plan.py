"""How a simulated model is spread: the same wrapping that a real run gets, on a mesh of the fake world."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel.context import split_sequences
from acc_plugins.parallel.exchange import line_of
from acc_plugins.parallel.split import reach_of, split_model
from acc_plugins.simulate.memory import local
from acc_plugins.simulate.traffic import TrafficCounter
from acc_plugins.strategies.buffers import saved_buffers
from acc_plugins.strategies.checkpointing import checkpoint_block
from acc_plugins.strategies.fsdp2_mesh import shard_mesh
from acc_plugins.strategies.fsdp2_sharding import Sharding, checked_units, wrap
from acc_plugins.strategies.fsdp2_wrapping import chosen_blocks
from acc_plugins.support import UnsupportedError

_FORMATS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_DDP_BUCKETS = (
    1024 * 1024,
    25 * 1024 * 1024,
)  # DistributedDataParallel's first bucket and the others, in bytes


def make_plan(
    world_size: int,
    parallelism: ParallelismConfig | None,
    plugin: FullyShardedDataParallelPlugin | None,
    mixed_precision: str,
    recompute: str,
) -> Plan:
    """The options, checked against each other. Raises ValueError naming the one that does not fit."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a positive whole number, got {world_size!r}")
    if mixed_precision not in _FORMATS:
        raise ValueError(f"mixed_precision must be one of {', '.join(_FORMATS)}, got {mixed_precision!r}")
    if recompute not in ("none", "blocks", "full"):
        raise ValueError(f"recompute must be one of none, blocks, full, got {recompute!r}")
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError(
            "simulate knows FSDP of version 2: give FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if parallelism is None:
        parallelism = (
            ParallelismConfig(dp_replicate_size=world_size)
            if plugin is None
            else ParallelismConfig(dp_shard_size=world_size)
        )
    if parallelism.total_size != world_size:
        raise ValueError(
            f"the sizes of {parallelism} make {parallelism.total_size} ranks, not world_size={world_size}"
        )
    if parallelism.dp_shard_enabled and plugin is None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if plugin is not None and not can_pretend():
        raise UnsupportedError(
            f"torch {torch.__version__} cannot gather shards that only pretend to have memory: use a newer torch, or leave fsdp_plugin out"
        )
    if parallelism.sp_enabled:
        raise ValueError(
            "simulate does not split sequences by sp_size: simulate cp_size, which keeps as much on a rank"
        )
    return Plan(parallelism, plugin, mixed_precision, recompute)


def can_pretend() -> bool:
    """Whether this torch runs collectives on tensors without memory."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"))


@dataclass
class Plan:
    """One way to spread a model."""

    parallelism: ParallelismConfig
    plugin: FullyShardedDataParallelPlugin | None
    mixed_precision: str
    recompute: str
    mesh: DeviceMesh | None = field(default=None, init=False)
    world: World | None = field(default=None, init=False)

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes in use with their sizes."""
        return {axis: getattr(self.parallelism, f"{axis}_size") for axis in self.parallelism.active_mesh_dims}

    @property
    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel would do it."""
        return self.plugin is None and self.parallelism.active_mesh_dims == ["dp_replicate"]

    def axes_of_groups(self) -> dict[str, str]:
        """Names of process groups -> axes of the mesh."""
        if self.mesh is None:
            return {}
        found: dict[str, str] = {}
        lines: dict[str, DeviceMesh | None] = {axis: self.mesh[axis] for axis in self.axes}
        for name in ("dp_shard_cp", "dp_cp", "dp"):
            lines[name] = self.parallelism.joined_mesh(name, self.mesh)
        for axis, line in lines.items():
            if line is not None:
                found.setdefault(line.get_group().group_name, axis)
        return found

    def split(self, model: nn.Module, world: World) -> nn.Module:
        """`model` (on the meta device) with its layers and sequences split, and nothing sharded."""
        self._meet(world)
        return split_model(model, self.parallelism, self.mesh, world)

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        """`model` (on the meta device) as it is trained. Raises ValueError for a policy that does not fit it."""
        if self.plugin is None:
            model = self.split(model, world)
            self.checkpoint(model)
            return model
        how = self._sharding(world)
        units = checked_units(model, how)
        self.checkpoint(model, units.blocks)
        wrap(model, how, units)
        return model

    def checkpoint(self, model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> None:
        """Let the activations be computed again that `recompute` names; `blocks` are those of `model`, where they are known.

        Raises ValueError where it has none.
        """
        if self.recompute == "full":
            checkpoint_block(model)
        if self.recompute != "blocks":
            return
        policy = self.plugin or FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
        if blocks is None:
            blocks = chosen_blocks(model, policy)
        if not blocks:
            raise ValueError(
                f"recompute='blocks' finds no block of {type(model).__name__}: give fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, "
                "auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=[...]), or a model whose _no_split_modules names the "
                "classes of its blocks, or say recompute='full'"
            )
        for block in blocks:
            checkpoint_block(block)

    def cast(self, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
        """Model and batch in the format in which FSDP computes."""
        dtype = None if self.plugin is None else _FORMATS[self.mixed_precision]
        if dtype is None:
            return model, batch
        given = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        return model.to(dtype), given

    @contextmanager
    def around(self, model: nn.Module, batch: Any) -> Iterator[None]:
        """Around a forward and its backward: the format to compute in, and this rank's part of each sequence of `batch`, in place."""
        dtype = _FORMATS[self.mixed_precision]
        format_of: AbstractContextManager[Any] = (
            nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        )
        with ExitStack() as stack:
            reach = reach_of(model)
            if reach is not None and self.mesh is not None:
                buffers = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]
                line = line_of(self.mesh, "cp")
                stack.enter_context(split_sequences([reach], line, buffers, [1] * len(buffers)))
            stack.enter_context(format_of)
            yield

    def exchange(self, model: nn.Module, counter: TrafficCounter) -> None:
        """What strategies exchange after backward: gradients where nothing is sharded, and buffers."""
        trained: list[Tensor] = [p for p in model.parameters() if p.grad is not None]
        axes = {axis: size for axis, size in self.axes.items() if axis != "tp"}
        ranks = math.prod(axes.values())
        if self.world is None or not trained or ranks == 1:
            return
        name = "+".join(axes)
        if self.plugin is not None:
            self._send_buffers([b for m in model.modules() for b in saved_buffers(m)], name, ranks, counter)
            return
        calls = 1
        if self.is_ddp:
            calls = len(torch.distributed._compute_bucket_assignment_by_size(trained, list(_DDP_BUCKETS))[0])
            if buffers := list(model.buffers()):
                counter.add(name, "broadcast", sum(b.nbytes for b in buffers), ranks)
        counter.add(name, "all_reduce", sum(local(p).nbytes for p in trained), ranks, calls)

    def _send_buffers(self, buffers: list[Tensor], name: str, ranks: int, counter: TrafficCounter) -> None:
        """As `SharedBuffers` does: one broadcast for each format."""
        if buffers:
            formats = len({buffer.dtype for buffer in buffers})
            counter.add(name, "broadcast", sum(b.nbytes for b in buffers), ranks, formats)

    def _meet(self, world: World) -> None:
        if self.mesh is None:
            self.mesh = self.parallelism.build_device_mesh("cpu")
            self.world = world

    def _sharding(self, world: World) -> Sharding:
        self._meet(world)
        assert self.plugin is not None
        return Sharding(
            plugin=self.plugin,
            world=world,
            shards=shard_mesh(world, self.mesh, self.parallelism),
            mesh=self.mesh,
            parallelism=self.parallelism,
            mixed_precision=self.mixed_precision,
        )
