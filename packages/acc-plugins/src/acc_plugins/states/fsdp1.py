"""States of models under FullyShardedDataParallel: torch alone knows what lies where in its flat parameters, so torch is asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from acc_plugins.states.spread import as_dtensors, map_tensors


def has_fsdp1(module: nn.Module) -> bool:
    """Whether the module is, or holds, a FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without that module there can be none
    return fsdp is not None and any(
        isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules()
    )


@contextmanager
def in_shards(module: nn.Module) -> Iterator[None]:
    """Within it, states of the module and its optimizers are those of shards, on the devices where they are.

    torch's own settings for the CPU (`offload_to_cpu`) crash where the CPU is the device.
    """
    from torch.distributed import fsdp  # noqa: PLC0415  whoever calls this has it loaded

    with fsdp.FullyShardedDataParallel.state_dict_type(
        module,
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(offload_to_cpu=False),
        fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield


def weights(module: nn.Module) -> dict[str, Any]:
    """The weights by the user's names, in shards of rows, as copies."""
    with in_shards(module):
        return as_dtensors(module.state_dict())


def optimizer_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """`state` and `param_groups` by the names of the model's parameters, in shards.

    torch gives all parameters of a flat one the same `step`; here each has its own, since who loads a shared one counts it up for each.
    """
    from torch.distributed import fsdp  # noqa: PLC0415

    with in_shards(module):
        state = as_dtensors(fsdp.FullyShardedDataParallel.optim_state_dict(module, optimizer))
    own: dict[str, Any] = map_tensors(lambda tensor: tensor if tensor.dim() else tensor.clone(), state)
    return own


def optimizer_state_to_load(module: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from `state` by names with whole tensors; those are asked for one flat parameter at a time."""
    from torch.distributed import fsdp  # noqa: PLC0415

    with in_shards(module):
        made: dict[str, Any] = fsdp.FullyShardedDataParallel.optim_state_dict_to_load(
            module, optimizer, dict(state)
        )
    return made
