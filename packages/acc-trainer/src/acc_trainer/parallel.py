"""What a script asks of the axes of a mesh: its place on one, and sequences that are split over several processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

import acc_plugins.parallel  # lazy
from acc_ops.logging import get_logger

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator
    from acc_trainer.views import Views

logger = get_logger(__name__)


def rank_along(accelerator: Views, axis: str) -> int:
    """This process's place on an axis of the mesh, 0 where the axis is not in use. Raises `RuntimeError` without a parallelism_config."""
    config = accelerator.parallelism_config
    if config is None:
        raise RuntimeError(
            f"there is no {axis!r} axis: this Accelerator was built without a parallelism_config"
        )
    mesh = accelerator.torch_device_mesh
    if not getattr(config, f"{axis}_enabled") or mesh is None:
        return 0
    return int(mesh[axis].get_local_rank())


def maybe_context_parallel(
    accelerator: Accelerator, buffers: Any, buffer_seq_dims: Any, no_restore_buffers: Any
) -> AbstractContextManager[None]:
    """`buffers` cut along their sequences, and the attention of prepared models over the whole of them; nothing, said once, while the context axis
    is not in use. Raises `ValueError` for a length that the ranks do not divide."""
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        if any(given is not None for given in (buffers, buffer_seq_dims, no_restore_buffers)):
            logger.warning_once(
                "maybe_context_parallel has no effect: cp_size of the Accelerator's parallelism_config is not above 1"
            )
        return nullcontext()
    reaches = [_reach(accelerator, model) for model in accelerator._models]
    return acc_plugins.parallel.context_parallel(
        accelerator.torch_device_mesh,
        [reach for reach in reaches if reach is not None],
        buffers or (),
        buffer_seq_dims or (),
        no_restore_buffers or (),
        rotate=config.cp_handler.cp_comm_strategy,
    )


def ulysses_loader(accelerator: Accelerator, loader: Any, model: Any) -> Any:
    """The loader with every batch cut along the sequence, for a prepared `model`; the same loader while the sequence axis is not in use.

    Raises `ValueError` for a model that was not prepared.
    """
    config = accelerator.parallelism_config
    if config is None or not config.sp_enabled:
        return loader
    reach = _reach(accelerator, model)
    if reach is None:
        raise ValueError(
            f"sp_size={config.sp_size} splits the attention of prepared models, and this {type(model).__name__} was not prepared: call "
            "accelerator.prepare(model, ...) first"
        )
    return acc_plugins.parallel.split_loader(loader, accelerator.torch_device_mesh, reach)


def open_attention(accelerator: Views, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """The attention of the models among `objects` sees whole sequences, of which this process has a part; the same objects.

    Nothing happens while no axis splits sequences; a model that is prepared is open already. Raises `ValueError`, on every rank, for a model that
    mixes places in another way.
    """
    config = accelerator.parallelism_config
    if config is not None and (config.cp_enabled or config.sp_enabled):
        axes = replace(config, tp_size=1, tp_handler=None)  # its layers are split when it is prepared
        for model in objects:
            if isinstance(model, nn.Module):
                inner = accelerator.strategy.unwrap(model)
                acc_plugins.parallel.split_model(
                    inner, axes, accelerator.torch_device_mesh, accelerator.world
                )
    return objects


def _reach(accelerator: Accelerator, model: Any) -> Any:
    return acc_plugins.parallel.reach_of(accelerator.strategy.unwrap(model))
