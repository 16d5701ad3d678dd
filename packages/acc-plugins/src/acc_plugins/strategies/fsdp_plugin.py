"""What both versions of FSDP ask of their plugin: which modules stay whole, and what every rank must have alike."""

from __future__ import annotations

import logging
import re

from torch import nn

from acc_ops.comm import TorchComm
from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.strategies.agreement import Facts, told

logger = logging.getLogger(__name__)
_OF_ALL_RANKS = (
    "sharding_strategy",
    "reshard_after_forward",
    "mixed_precision_policy",
    "cpu_offload",
    "state_dict_type",
    "use_orig_params",
    "sync_module_states",
    "backward_prefetch",
    "forward_prefetch",
)


def check_made_for(plugin: FullyShardedDataParallelPlugin, version: int, world: World) -> TorchComm:
    """How the ranks of `world` speak. Raises ValueError for a plugin of the other version, and for a world without torch.distributed."""
    if plugin.fsdp_version != version:
        raise ValueError(
            f"FSDP{version}Strategy needs fsdp_version={version}, got {plugin.fsdp_version}: use FSDP{plugin.fsdp_version}Strategy"
        )
    if not isinstance(world.comm, TorchComm):
        raise ValueError(
            f"FSDP needs a torch.distributed process group, but this world speaks through {type(world.comm).__name__}: use "
            "ReplicatedStrategy there"
        )
    return world.comm


def ignored_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Those of `model` that the plugin leaves out: by a regular expression for whole names, or by themselves."""
    said = plugin.ignored_modules
    if said is None:
        return []
    if isinstance(said, str):
        return [module for name, module in model.named_modules() if name and re.fullmatch(said, name)]
    wanted = {id(module) for module in said}
    return [module for module in model.modules() if id(module) in wanted]


def say_what_is_not_ignored(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """A warning where `ignored_modules` is given and leaves out nothing of this model: it may have been meant for another one."""
    said = plugin.ignored_modules
    if said and not ignored_modules(model, plugin):
        what = repr(said) if isinstance(said, str) else f"a list of {len(list(said))} modules"
        logger.warning(
            "ignored_modules has no effect on %s: no module of it is meant by %s (a regular expression must match a whole name, such as "
            "'blocks.0.head' or '.*head')",
            type(model).__name__,
            what,
        )


def told_ignored(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Facts:
    """The names of those modules, as every rank tells them."""
    ignored = {id(module) for module in ignored_modules(model, plugin)}
    return [(name, "ignored") for name, module in model.named_modules() if id(module) in ignored]


def told_options(plugin: FullyShardedDataParallelPlugin) -> dict[str, str]:
    """By name, what of the plugin decides what is sent or what files hold."""
    return {name: told(getattr(plugin, name)) for name in _OF_ALL_RANKS}
