"""Weights and registered objects of an Accelerator, for its own checkpoints and for others to read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import acc_bigmodel
from acc_ops.callers import warn_caller
from acc_plugins.states.names import plain_names, plain_state
from acc_plugins.states.whole import check_no_checkpoint
from acc_trainer.checkpoint.meeting import led, meet
from acc_trainer.checkpoint.together import together

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the weights on the process that writes; see `Accelerator.save_model`.

    Where the whole weights lie on that process it may be the only one that calls, also before and after calls of all. Others that call return when it
    has written, into the folder that it was given: a warning where theirs has another name. Where it does not come within a minute they
    go on with a warning. Where weights are gathered (FSDP, meshes) every process must call: CheckpointError, after a minute, otherwise. What fails
    on the process that writes raises on all that called.
    """
    if not os.fspath(folder):
        raise ValueError("save_model needs a folder to write into, got an empty name; '.' is this folder")
    world, strategy = accelerator.world, accelerator.strategy

    def save() -> None:
        check_no_checkpoint(folder, "save_model")
        state = full_state(accelerator, model)
        if strategy.writes:
            acc_bigmodel.save_weights(state, folder, "model", max_shard_size, safe_serialization)

    doing = f"saving a model into {os.path.normpath(folder)}"
    if world.size == 1:
        save()
    elif not strategy.gathers:
        leader = world.rank - world.local_rank if strategy.save_on_each_node else 0
        done = led(world, "save_model", doing, leader, save)
        if done != doing:
            warn_caller(
                f"save_model: rank {leader}, which writes, was {done}; rank {world.rank} was {doing}, where nothing is written. One name for all "
                "ranks comes from rank 0: broadcast_object_list"
            )
    else:
        meet(world, "save_model", takes_wait_s=False)
        with together(world, doing):
            save()


def full_state(accelerator: Accelerator, model: nn.Module) -> Any:
    """All weights of a model, also of one that is offloaded; at least on the processes that write. RuntimeError, naming them, for those that have no
    values anywhere."""
    # a lazy start: it brings the hooks of offloaded models, which a training run does not need
    from acc_bigmodel.collect import get_state_dict_offloaded_model  # noqa: PLC0415

    own = accelerator.strategy.unwrap(model)
    if any(tensor.is_meta for tensor in own.parameters()):
        state = plain_state(get_state_dict_offloaded_model(own))
        lost = [name for name in plain_names(own.state_dict()) if name not in state]
        if lost:
            raise RuntimeError(
                f"{len(lost)} weights of {type(own).__name__} are on the meta device and have no values anywhere, so a file would lack them: "
                f"{', '.join(lost[:10])}{', ...' if len(lost) > 10 else ''}. Load them first, with load_checkpoint_in_model or "
                "model.to_empty(device='cpu') and an initialisation"
            )
        return state
    return accelerator.strategy.state(model)


def checkpointable(objects: Sequence[Any]) -> Sequence[Any]:
    """The same objects. Raises `ValueError` for those that have no `state_dict` and `load_state_dict`."""
    wrong = [one for one in objects if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))]
    if wrong:
        raise ValueError(
            f"only objects with state_dict() and load_state_dict() can be checkpointed, these lack them: {wrong}"
        )
    return objects


def registered(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    """Add `hook` to `hooks`; the handle takes it out again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
