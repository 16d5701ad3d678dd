"""Over which ranks FSDP shards: all of them in a row, or some axes of a mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from acc_ops.world import World
from acc_plugins.options.parallelism import ParallelismConfig


def shard_mesh(
    world: World, mesh: DeviceMesh | None = None, parallelism: ParallelismConfig | None = None
) -> DeviceMesh:
    """Of `mesh` the axes along which samples or sequences differ, copies first; without one, all ranks in a row. Every rank calls it."""
    if mesh is None or parallelism is None:
        group = getattr(world.comm, "group", None)
        if group is None:
            return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
        return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=("dp_shard",))
    shards = [axis for axis in ("dp_shard", "cp", "sp") if getattr(parallelism, f"{axis}_enabled")]
    if len(shards) == 1:
        return mesh["dp_replicate", shards[0]] if parallelism.dp_replicate_enabled else mesh[shards[0]]
    joined = parallelism.joined_mesh("dp_shard_cp", mesh)
    assert joined is not None
    if not parallelism.dp_replicate_enabled:
        return joined
    if not hasattr(DeviceMesh, "_concatenate"):  # a torch that slices joined axes without a warning
        return mesh["dp_replicate", "dp_shard_cp"]
    both: DeviceMesh = DeviceMesh._concatenate([mesh["dp_replicate"], joined])
    return both
