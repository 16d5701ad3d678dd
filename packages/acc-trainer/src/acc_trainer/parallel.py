"""What a script asks of the axes of a mesh: its place on one, and sequences that are split over several processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

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
    """Nothing, said once, while the context axis is not in use. Raises `NotImplementedError` where it is: the engine is not built yet."""
    config = accelerator.parallelism_config
    if config is not None and config.cp_enabled:
        raise NotImplementedError(
            f"parallelism_config asks for cp_size={config.cp_size}, but the engine that splits sequences (issue 8) is not built yet in "
            "acc: leave cp_size out"
        )
    if any(given is not None for given in (buffers, buffer_seq_dims, no_restore_buffers)):
        logger.warning_once(
            "maybe_context_parallel has no effect: cp_size of the Accelerator's parallelism_config is not above 1"
        )
    return nullcontext()


def ulysses_loader(accelerator: Accelerator, loader: Any, model: Any) -> Any:
    """The same loader while the sequence axis is not in use. Raises `NotImplementedError` where it is: the engine is not built yet."""
    config = accelerator.parallelism_config
    if config is not None and config.sp_enabled:
        raise NotImplementedError(
            f"parallelism_config asks for sp_size={config.sp_size} for {type(model).__name__}, but DeepSpeed's sequence parallelism "
            "(issue 8) is not built yet in acc: leave sp_size out"
        )
    return loader
