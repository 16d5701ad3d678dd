"""What FSDP version 1 lays into one flat parameter, and what it cannot: found before anything is changed, since torch finds it with half the blocks wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.states import fsdp1
from acc_plugins.strategies.fsdp2_wrapping import Named, chosen_blocks, gathered_together
from acc_plugins.strategies.fsdp_plugin import ignored_modules


def flat_parameters(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[Named]:
    """The parameters of each flat one that torch will make of `model`. None for a model that holds wrapped blocks already."""
    if fsdp1.has_fsdp1(model):
        return []
    taken = frozenset(id(p) for p in ignored_parameters(model, plugin))
    return gathered_together(model, ((unit,) for unit in _units(model, plugin, taken)), taken)


def ignored_parameters(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Parameter]:
    """Those of the modules that are left out."""
    return [p for module in ignored_modules(model, plugin) for p in module.parameters()]


def _units(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: frozenset[int]
) -> Sequence[nn.Module]:
    """The modules that torch wraps inside `model`, those inside others first; under mixed precision also layers that stay in float32 (BatchNorm)."""
    blocks = chosen_blocks(model, plugin, ignored)
    apart = getattr(plugin.mixed_precision_policy, "_module_classes_to_ignore", ())
    if plugin.auto_wrap_policy is None or not apart:
        return blocks
    return [*(module for module in model.modules() if isinstance(module, tuple(apart))), *blocks]


def checked_flat_parameters(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, as_float32: Iterable[Tensor] = ()
) -> list[Named]:
    """`flat_parameters`. Raises ValueError, naming the parameter and the ways out, for what torch does not lay into one, alone or together.

    `as_float32` are parameters that become float32 before.
    """
    _check_each(model, plugin)
    float32 = {id(p) for p in as_float32}
    found = flat_parameters(model, plugin)
    for flat in found:
        _check_together(type(model).__name__, flat, float32, merged=not plugin.use_orig_params)
    return found


def _check_together(kind: str, flat: Named, float32: set[int], *, merged: bool) -> None:
    name, first = flat[0]
    for other, p in flat[1:]:
        formats = ["torch.float32" if id(one) in float32 else str(one.dtype) for one in (first, p)]
        if formats[0] != formats[1]:
            raise ValueError(
                f"{name} of {kind} holds numbers of {formats[0]} and {other} of {formats[1]}, and FSDP version 1 puts both into one flat parameter: "
                "give both the same format (model.float()), or wrap them apart by auto_wrap_policy"
            )
        if first.requires_grad != p.requires_grad and merged:
            frozen, trained = (other, name) if first.requires_grad else (name, other)
            raise ValueError(
                f"{frozen} of {kind} is frozen and {trained} is trained, and FSDP version 1 puts both into one flat parameter: give "
                "use_orig_params=True (FSDP_USE_ORIG_PARAMS), wrap them apart by auto_wrap_policy, or use fsdp_version=2"
            )


def _check_each(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    apart = {id(p) for p in ignored_parameters(model, plugin)}
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise ValueError(
                f"{name} of {type(model).__name__} is split already (a DTensor), which FSDP version 1 does not shard: use fsdp_version=2"
            )
        if id(p) in apart:
            continue
        if not p.is_floating_point():
            raise ValueError(
                f"{name} of {type(model).__name__} holds numbers of {p.dtype}, and FSDP version 1 lays real floating numbers only into its flat "
                "parameters: use fsdp_version=2, or name its module in ignored_modules"
            )
        if not p.dim():
            raise ValueError(
                f"{name} of {type(model).__name__} is a number without a dimension, which FSDP version 1 does not lay into its flat parameters: use "
                "fsdp_version=2, name its module in ignored_modules, or give it one dimension (torch.tensor([1.0]))"
            )
