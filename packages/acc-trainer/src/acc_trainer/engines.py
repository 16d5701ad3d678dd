"""Which engines a run asks for, by arguments or by variables, and whether they fit together and fit the processes."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import acc_plugins  # lazy: option classes are loaded where they are asked for
from acc_ops.callers import warn_caller
from acc_ops.comm import SoloComm, TorchComm
from acc_ops.devices import device_row
from acc_ops.environment import parse_flag_from_env, patch_environment
from acc_trainer.launch.unbuilt import refuse_unbuilt, refuse_unbuilt_variables

if TYPE_CHECKING:
    import torch

    from acc_ops.world import World


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The plugins of a run; None for what it does not use."""

    fsdp: Any = None  # a FullyShardedDataParallelPlugin
    parallelism: Any = None  # a ParallelismConfig

    @property
    def need_a_group(self) -> bool:
        """Whether they speak through torch's process groups, also where one process is alone."""
        return self.fsdp is not None or (self.parallelism is not None and self.parallelism.total_size > 1)


def check_plugins(
    *,
    fsdp_plugin: Any = None,
    torch_tp_plugin: Any = None,
    parallelism_config: Any = None,
    **unbuilt: Any,
) -> None:
    """Raise `TypeError` for an argument that is no such plugin, and `ValueError` for one of `unbuilt` engines."""
    refuse_unbuilt(**unbuilt)
    for name, value, kind in (
        ("fsdp_plugin", fsdp_plugin, "FullyShardedDataParallelPlugin"),
        ("torch_tp_plugin", torch_tp_plugin, "TorchTensorParallelPlugin"),
        ("parallelism_config", parallelism_config, "ParallelismConfig"),
    ):
        if value is not None and not isinstance(value, getattr(acc_plugins, kind)):
            raise TypeError(f"{name} must be a {kind}, got {type(value).__name__}: {value!r:.80}")


def given_engines(
    *, fsdp_plugin: Any = None, torch_tp_plugin: Any = None, parallelism_config: Any = None
) -> Engines:
    """What the arguments ask for. Raises `ValueError` for two that say the same."""
    if torch_tp_plugin is not None:
        if parallelism_config is not None:
            raise ValueError(
                f"torch_tp_plugin (tp_size={torch_tp_plugin.tp_size}) and parallelism_config both say how layers are split: leave out "
                "torch_tp_plugin"
            )
        warn_caller(
            f"torch_tp_plugin is deprecated: write parallelism_config=ParallelismConfig(tp_size={torch_tp_plugin.tp_size})",
            FutureWarning,
        )
        parallelism_config = acc_plugins.ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
        parallelism_config._mesh = torch_tp_plugin.torch_device_mesh
    return Engines(fsdp=fsdp_plugin, parallelism=parallelism_config)


def with_variables(given: Engines) -> Engines:
    """The same, and what ACCELERATE_USE_FSDP and ACCELERATE_USE_PARALLELISM_CONFIG ask for; `ValueError` for engines that cannot go together."""
    refuse_unbuilt_variables()
    made = given
    if made.fsdp is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        made = dataclasses.replace(made, fsdp=acc_plugins.FullyShardedDataParallelPlugin())
    if made.parallelism is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        made = dataclasses.replace(made, parallelism=acc_plugins.ParallelismConfig())
    if made.fsdp is not None and made.parallelism is not None and made.fsdp.fsdp_version != 2:
        raise ValueError(
            f"a parallelism_config needs fsdp_version=2, got {made.fsdp.fsdp_version}: give "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or leave parallelism_config out (version 1 has reshard_after_forward=HYBRID_SHARD)"
        )
    if made.fsdp is None and made.parallelism is not None and made.parallelism.dp_shard_enabled:
        raise ValueError(
            f"dp_shard_size={made.parallelism.dp_shard_size} shards the model, which FSDP does: give "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or say dp_replicate_size"
        )
    return made


def check_same(given: Engines, used: Engines) -> None:
    """`ValueError` where a later Accelerator asks for another engine than the run has."""
    for name, argument in (("fsdp", "fsdp_plugin"), ("parallelism", "parallelism_config")):
        wanted, there = getattr(given, name), getattr(used, name)
        if wanted is not None and wanted is not there and wanted != there:
            raise ValueError(
                f"this run was started {'with another' if there is not None else 'without a'} {argument}, which cannot change any more: pass it "
                "to the first Accelerator, or end the run before with its end_training()"
            )


def group_of_one(world: World) -> World | None:
    """A world for a process that is alone, with a process group for the engines that ask for one; None where nothing is to be done."""
    if not isinstance(world.comm, SoloComm) or dist.is_initialized():
        return None
    own = device_row(world.device).backend
    backend = own if own == "gloo" else f"cpu:gloo,{world.device.type}:{own}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dataclasses.replace(world, comm=TorchComm())


def environment_of(engines: Engines) -> AbstractContextManager[None]:
    """The variables in which other libraries look for the engines of a run, while it lasts: transformers loads weights on rank 0 only."""
    if engines.fsdp is None or not engines.fsdp.cpu_ram_efficient_loading:
        return nullcontext()
    return patch_environment(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")


def mesh_of(engines: Engines, device: torch.device) -> Any:
    """The mesh of the run, or None. Every rank calls it. Raises `ValueError` on all of them where their sizes differ."""
    return None if engines.parallelism is None else engines.parallelism.get_device_mesh(device.type)
