"""The steps of preparing a model for FSDP by the names that other libraries call, or replace with their own.

`accelerator` is whatever has `state.fsdp_plugin`, `device`, `torch_device_mesh`, `parallelism_config` and `mixed_precision`: an Accelerator, or what
FSDP2Strategy hands in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from acc_hooks.ties import shared_parameters
from acc_ops.world import current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.strategies.fsdp2_mesh import shard_mesh
from acc_plugins.strategies.fsdp2_sharding import Sharding, checkpoint_blocks, shard_model
from acc_plugins.strategies.fsdp2_wrapping import chosen_blocks
from acc_plugins.strategies.same_start import shard_from_rank_0

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """`model`, sharded in place by `fully_shard`; one that is sharded already comes back as it is.

    Every rank calls it. Raises ValueError on every rank, before anything is changed, for ranks that built different models, weights that nobody
    has, and a policy that names a class which the model has not.
    """
    return shard_model(model, _sharding_of(accelerator))


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Activation checkpointing for the blocks that the plugin's policy chooses, in place; their inputs in CPU memory where the plugin says so.

    Random numbers are the same when a block computes again, so dropout is right.
    """
    plugin = accelerator.state.fsdp_plugin
    checkpoint_blocks(model, plugin, chosen_blocks(model, plugin))
    return model


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Whether a module of `model` becomes a unit of its own, as a function; None without a policy. OptionError for an unknown class name."""
    if fsdp2_plugin.auto_wrap_policy is None:
        return None
    chosen = {id(block) for block in chosen_blocks(model, fsdp2_plugin)}
    return lambda module: id(module) in chosen


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the names in the user's own model, without those of checkpoint wrappers and of torch.compile."""
    return {_canonical(name): value for name, value in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Tensor], cpu_offload: bool = False
) -> None:
    """Give a sharded `model`, also one on the meta device, the whole weights that rank 0 has in `full_sd`; `cpu_offload`: shards stay on the CPU.

    Every rank calls it; others may give an empty `full_sd`. Raises KeyError on every rank for names that rank 0 lacks.
    """
    world = getattr(accelerator, "world", None) or current_world()
    own = model.state_dict()
    lacking = [name for name in own if name not in full_sd] if world.is_main else []
    lacking = world.comm.broadcast_object(lacking)
    if lacking:
        raise KeyError(f"full_sd on rank 0 lacks {', '.join(lacking[:5])}")
    device = torch.device("cpu") if cpu_offload else world.device
    loaded = {
        name: shard_from_rank_0(full_sd.get(name), empty, world, device)
        if isinstance(empty, Tensor)
        else empty
        for name, empty in own.items()
    }
    model.load_state_dict(loaded, assign=True)


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[int, Tensor]) -> None:
    """Replace every parameter of `optimizer` by the one that `mapping` has for its data pointer. KeyError for a pointer that it lacks."""
    for group in optimizer.param_groups:
        group["params"] = [mapping[_pointer(p)] for p in group["params"]]


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """torch's GradScaler."""
    return GradScaler(**kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of `modules`, or of those modules of `model` whose whole name the regular expression matches; moved to `device`."""
    if modules is None:
        return set()
    if isinstance(modules, str):
        modules = [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    found: set[nn.Parameter] = set()
    for module in modules:
        found.update(module.to(device).parameters())
    return found


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any],
    model: nn.Module,
    device: torch.device | str,  # noqa: ARG001  accelerate's signature
) -> Callable[[nn.Module], Any]:
    """`param_init_fn`, after which the weights that `model._tied_weights_keys` names are shared as before; unchanged where it names none."""
    keys = getattr(model, "_tied_weights_keys", None)
    if not keys:
        return param_init_fn
    shared = [module._parameters[name] for (module, name, _), *_ in shared_parameters(model)]
    kept = {id(p): p for p in shared}  # alive: their ids must not be given away
    made: dict[int, Any] = {}

    def retying(module: nn.Module) -> Any:
        before = {name: id(p) for name, p in module._parameters.items() if p is not None and id(p) in kept}
        result = param_init_fn(module)
        for name, old in before.items():
            module._parameters[name] = made.setdefault(old, module._parameters[name])
        return result

    return retying


def _sharding_of(accelerator: Any) -> Sharding:
    """How that accelerator shards; one of our own says it."""
    made = getattr(accelerator, "sharding", None) or getattr(
        getattr(accelerator, "strategy", None), "sharding", None
    )
    if isinstance(made, Sharding):
        return made
    world = getattr(accelerator, "world", None) or current_world()
    mesh, parallelism = accelerator.torch_device_mesh, accelerator.parallelism_config
    return Sharding(
        plugin=accelerator.state.fsdp_plugin,
        world=world,
        shards=shard_mesh(world, mesh, parallelism),
        mesh=mesh,
        parallelism=parallelism,
        mixed_precision=str(accelerator.mixed_precision),
    )


def _canonical(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _pointer(parameter: Any) -> int:
    """Where its data lie; placeholders say it in an attribute."""
    said = parameter.data_ptr
    return int(said() if callable(said) else said)
