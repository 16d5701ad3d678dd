"""Which strategy and which precision a run gets: the questions are answered here, once."""

from __future__ import annotations

import logging

import torch

from acc_ops.comm import TorchComm
from acc_ops.devices import device_module, device_row
from acc_ops.enums import PrecisionType
from acc_ops.handlers import KwargsHandler
from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.kwargs import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.precisions.amp import BFloat16Autocast, Float16Autocast
from acc_plugins.precisions.choose_fp8 import choose_fp8
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Strategy
from acc_plugins.support import UnsupportedError, check_support

logger = logging.getLogger(__name__)


def choose_strategy(
    world: World,
    precision: Precision,
    *,
    ddp_options: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    save_on_each_node: bool = False,
) -> Strategy:
    """The strategy for `world`: what `fsdp` shards, what `parallelism` splits over `world.mesh`, and without them by ranks.

    One rank -> a single device; torch.distributed -> DDP; any other Comm -> gradients averaged through it. Raises UnsupportedError for a
    combination that cannot work, and ValueError for options the chosen strategy cannot honour.
    """
    if fsdp is not None:
        return _sharding(world, precision, fsdp, parallelism, ddp_options, save_on_each_node)
    if parallelism is not None and parallelism.non_dp_dim_names:
        return _splitting(world, precision, parallelism, ddp_options, save_on_each_node)
    if world.size == 1:
        check_support(Strategy.name, precision.name, world.device.type)
        if ddp_options is not None:
            logger.info("DistributedDataParallelKwargs have no effect: there is one process")
        return Strategy(world, precision, save_on_each_node=save_on_each_node)
    if isinstance(world.comm, TorchComm):
        check_support(DDPStrategy.name, precision.name, world.device.type)
        return DDPStrategy(world, precision, options=ddp_options, save_on_each_node=save_on_each_node)
    check_support(ReplicatedStrategy.name, precision.name, world.device.type)
    options = ddp_options or DistributedDataParallelKwargs()
    if options.has_comm_hook:
        raise ValueError(
            f"comm_hook={options.comm_hook} compresses gradients inside DistributedDataParallel, but this world speaks through "
            f"{type(world.comm).__name__}: leave it out, or start processes with torch.distributed"
        )
    return ReplicatedStrategy(
        world, precision, broadcast_buffers=options.broadcast_buffers, save_on_each_node=save_on_each_node
    )


# torch's engines take a second to load, so each strategy's file is loaded only where it is chosen
def _sharding(
    world: World,
    precision: Precision,
    plugin: FullyShardedDataParallelPlugin,
    parallelism: ParallelismConfig | None,
    ddp_options: DistributedDataParallelKwargs | None,
    save_on_each_node: bool,
) -> Strategy:
    name = f"fsdp{plugin.fsdp_version}"
    check_support(name, precision.name, world.device.type)
    _check_group(world, f"FSDP (fsdp_version={plugin.fsdp_version})")
    if ddp_options is not None:
        logger.warning("DistributedDataParallelKwargs have no effect: FSDP shards the models")
    if plugin.fsdp_version == 2:
        from acc_plugins.strategies.fsdp2 import FSDP2Strategy  # noqa: PLC0415

        return FSDP2Strategy(
            world,
            precision,
            plugin,
            mesh=world.mesh,
            parallelism=parallelism,
            save_on_each_node=save_on_each_node,
        )
    if parallelism is not None:
        raise ValueError(
            "a parallelism_config needs fsdp_version=2, got 1: change it, or leave the config out"
        )
    from acc_plugins.strategies.fsdp1 import FSDP1Strategy  # noqa: PLC0415

    return FSDP1Strategy(world, precision, plugin, save_on_each_node=save_on_each_node)


def _splitting(
    world: World,
    precision: Precision,
    parallelism: ParallelismConfig,
    ddp_options: DistributedDataParallelKwargs | None,
    save_on_each_node: bool,
) -> Strategy:
    from acc_plugins.strategies.mesh import MeshStrategy  # noqa: PLC0415

    check_support(MeshStrategy.name, precision.name, world.device.type)
    _check_group(world, f"a parallelism_config with {', '.join(parallelism.non_dp_dim_names)}")
    return MeshStrategy(
        world,
        precision,
        parallelism,
        mesh=world.mesh,
        ddp_options=ddp_options,
        save_on_each_node=save_on_each_node,
    )


def _check_group(world: World, what: str) -> None:
    if not isinstance(world.comm, TorchComm):
        raise UnsupportedError(
            f"{what} speaks through a process group of torch.distributed, but this world speaks through {type(world.comm).__name__}: start "
            "processes with a launcher, or leave it out"
        )


def choose_precision(
    name: str | None,
    device: torch.device | str,
    *,
    scaler_options: GradScalerKwargs | None = None,
    autocast_options: AutocastKwargs | None = None,
    fp8_recipe: KwargsHandler | None = None,
    gathers_in_fp8: bool = False,
) -> Precision:
    """The precision called `name` ("no", "bf16", "fp16", "fp8"; None is "no") on `device`.

    `fp8_recipe` is an `AORecipeKwargs` or `TERecipeKwargs`; `gathers_in_fp8`: the strategy shards, and may gather weights in fp8. Raises ValueError for an unknown name and for a recipe without fp8, UnsupportedError
    where the device cannot do it or its library is absent.
    """
    device = torch.device(device)
    kind = _precision_type(name)
    if scaler_options is not None and kind is not PrecisionType.FP16:
        logger.warning(
            "GradScalerKwargs have no effect: only mixed_precision='fp16' scales the loss, this is %r",
            kind.value,
        )
    if fp8_recipe is not None and kind is not PrecisionType.FP8:
        raise ValueError(
            f"{type(fp8_recipe).__name__} is a recipe for mixed_precision='fp8', but mixed_precision is {kind.value!r}: change one of them"
        )
    if kind is PrecisionType.NO:
        if autocast_options is not None:
            logger.warning("AutocastKwargs have no effect: mixed_precision is 'no'")
        return Precision()
    autocast = {} if autocast_options is None else autocast_options.to_kwargs()
    if kind is PrecisionType.FP16:
        check_support(Strategy.name, kind.value, device.type)
        scaling = {} if scaler_options is None else scaler_options.to_kwargs()
        return Float16Autocast(device, scaler_options=scaling, **autocast)
    check_support(Strategy.name, kind.value, device.type)
    if kind is PrecisionType.FP8:
        return choose_fp8(device, fp8_recipe, autocast, gathers_in_fp8)
    _check_bf16_hardware(device)
    return BFloat16Autocast(device, **autocast)


def _precision_type(name: str | None) -> PrecisionType:
    try:
        return PrecisionType.NO if name is None else PrecisionType(str(name).lower())
    except ValueError:
        raise ValueError(
            f"unknown mixed_precision {name!r}: choose one of {', '.join(PrecisionType.list())}"
        ) from None


def _check_bf16_hardware(device: torch.device) -> None:
    # not torch.get_device_module, which knows no kind whose functions are ours (xla)
    supported = getattr(device_module(device_row(device.type)), "is_bf16_supported", None)
    if supported is not None and not supported():
        raise UnsupportedError(
            f"this {device.type} device has no bfloat16: use mixed_precision='fp16' or 'no'"
        )
