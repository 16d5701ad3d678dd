"""A model sharded by torch's `fully_shard`: everything that is done to it, in order.

[Note: the order] 1 what every rank must agree on is compared, and units are chosen: nothing is changed before that. 2 Rank 0's weights go to all ranks, or
where some have none the model is emptied. 3 Layers are split for tensor parallelism. 4 Trained weights become float32 under mixed precision.
5 Blocks get activation checkpointing. 6 `fully_shard`, from the innermost unit to the root. 7 An emptied model gets memory and rank 0's values, shard by
shard. Parameters that `fully_shard` must not see (see `parameters_apart`) are taken out meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from acc_ops.exchange import together, tried
from acc_ops.regions import is_compiled_module
from acc_ops.world import World
from acc_plugins.options import fsdp_values
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.strategies.checkpointing import checkpoint_block
from acc_plugins.strategies.fsdp2_wrapping import Unit, Units, check_formats, units_of
from acc_plugins.strategies.fsdp_plugin import ignored_modules, say_what_is_not_ignored
from acc_plugins.strategies.same_start import emptied, filled, must_be_sent, send_from_rank_0, started

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the models of a run are sharded: over the axes `shards` of `mesh`, which may have others that split layers or sequences."""

    plugin: FullyShardedDataParallelPlugin
    world: World
    shards: DeviceMesh
    mesh: DeviceMesh | None = None
    parallelism: ParallelismConfig | None = None
    mixed_precision: str = "no"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """In which formats weights are gathered and gradients averaged: the plugin's, else those of the run's mixed precision.

        In the latter case the model returns float32, as in any other run: a loss in 8 significant bits, or one that is multiplied by the
        scale of fp16, would be useless.
        """
        said: MixedPrecisionPolicy | None = self.plugin.mixed_precision_policy
        if said is not None:
            return said
        if self.mixed_precision == "no":
            return MixedPrecisionPolicy()
        derived = fsdp_values.precision_policy(self.mixed_precision, 2)
        return replace(derived, output_dtype=torch.float32)

    @property
    def offload(self) -> OffloadPolicy:
        """Where shards stay between their uses; memory is pinned only for an accelerator."""
        said: OffloadPolicy = self.plugin.cpu_offload
        if isinstance(said, CPUOffloadPolicy) and self.world.device.type == "cpu":
            return CPUOffloadPolicy(pin_memory=False)
        return said

    @property
    def shard_device(self) -> torch.device:
        """Where shards stay."""
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.world.device


def shard_model(model: nn.Module, how: Sharding) -> nn.Module:
    """`model`, sharded in place: its parameters are DTensors. One that is sharded already is not touched.

    Every rank calls it. Raises ValueError on every rank, before anything is changed, for ranks that built different models, weights that nobody
    has, a policy that names a class which the model has not, and two formats that are trained in one unit; and what a policy of the user's
    raises on one.
    """
    inner = uncompiled(model)
    if isinstance(inner, FSDPModule):
        return model
    found, error = tried(lambda: checked_units(inner, how))  # a policy of the user's may raise
    units = found or Units()
    sent = must_be_sent(inner, how.world, units.names(inner), error)
    say_what_is_not_ignored(inner, how.plugin)
    if sent:  # a module's own reset_parameters may raise
        together(how.world, lambda: started(inner) if how.world.is_main else None)
    values = emptied(inner) if sent else {}
    if not sent:
        send_from_rank_0([*inner.parameters(), *inner.buffers()], how.world)
    wrap(inner, how, units)
    if sent:
        filled(inner, values, how.world, how.shard_device)
    if how.world.device.type != "cpu":
        for p in parameters_apart(inner, how.plugin):
            p.data = p.data.to(how.world.device)
    return model


def checked_units(model: nn.Module, how: Sharding) -> Units:
    """The units of `model`. Raises ValueError for a class name that it has not, and for two formats that are trained in one unit."""
    apart = frozenset(map(id, parameters_apart(model, how.plugin)))
    units = units_of(model, how.plugin, apart)
    check_formats(model, units, apart, () if how.policy.param_dtype is None else _LOW)
    return units


def wrap(model: nn.Module, how: Sharding, units: Units) -> None:
    """Steps 3 to 6 of the note above, in place, whatever the values of `model` are."""
    if how.parallelism is not None and how.parallelism.non_dp_dim_names:
        from acc_plugins.parallel import split_model  # noqa: PLC0415  only where layers are split

        split_model(model, how.parallelism, how.mesh)
    if how.policy.param_dtype is not None:
        keep_master_weights(model)
    if how.plugin.activation_checkpointing:
        checkpoint_blocks(model, how.plugin, units.blocks)
    with _without(model, parameters_apart(model, how.plugin)):
        for unit in units.units:
            _fully_shard(unit, how)
        fully_shard(model, mesh=how.shards, mp_policy=how.policy, offload_policy=how.offload)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside a shell of torch.compile."""
    shell: Any = model
    inner: nn.Module = shell._orig_mod if is_compiled_module(model) else model
    return inner


def parameters_apart(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Parameter]:
    """What stays whole on every rank: the parameters of ignored modules, and what torch cannot shard.

    That are numbers without a dimension, packed bits, and what has no elements, on whose gradient torch's backward fails.
    """
    ignored = [p for module in ignored_modules(model, plugin) for p in module.parameters()]
    others = [p for p in model.parameters() if not p.dim() or not p.numel() or not p.is_floating_point()]
    return list({id(p): p for p in [*ignored, *others]}.values())


def checkpoint_blocks(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, blocks: Sequence[nn.Module]
) -> None:
    """Activation checkpointing for those blocks of `model`; their inputs in CPU memory where the plugin says so."""
    if not blocks:
        logger.warning(
            "activation_checkpointing has no effect on %s: auto_wrap_policy chooses no block of it",
            type(model).__name__,
        )
    for block in blocks:
        checkpoint_block(uncompiled(block), offload=bool(plugin.activation_checkpointing_offload))


def keep_master_weights(model: nn.Module) -> None:
    """Weights that are trained in mixed precision become float32; frozen ones keep their format."""
    low = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dtype in _LOW]
    if low:
        logger.warning(
            "%s and %d others of %s become float32: mixed precision computes in fewer bits from those",
            low[0][0],
            len(low) - 1,
            type(model).__name__,
        )
    with torch.no_grad():
        for _, p in low:
            p.data = p.data.float()


def _fully_shard(unit: Unit, how: Sharding) -> None:
    """torch refuses an `output_dtype` below the root, where the next module would get another format than its weights."""
    modules: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
    fully_shard(
        modules,
        mesh=how.shards,
        reshard_after_forward=bool(how.plugin.reshard_after_forward) and unit.reshards,
        mp_policy=replace(how.policy, output_dtype=None),
        offload_policy=how.offload,
    )


@contextmanager
def _without(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """`model` without those parameters inside the block, and with them in their places afterwards."""
    hidden = {id(p) for p in parameters}
    before: list[tuple[nn.Module, Mapping[str, Any]]] = []
    for module in model.modules():
        own = module._parameters
        if any(p is not None and id(p) in hidden for p in own.values()):
            before.append((module, dict(own)))
            for name in [name for name, p in own.items() if p is not None and id(p) in hidden]:
                del own[name]
    try:
        yield
    finally:
        for module, order in before:
            now = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: now.get(name, p) for name, p in order.items()})
