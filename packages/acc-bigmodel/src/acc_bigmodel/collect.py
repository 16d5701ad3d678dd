"""Everything back: the real weights of a model that is dispatched or offloaded, by name."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from acc_hooks.visit import align_module_device, has_offloaded_params
from acc_ops.devices import DeviceLike

logger = logging.getLogger(__name__)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with every value on the CPU, wherever it is kept; weights on the disk stay mapped.

    A tensor that is on meta and has no values anywhere is left out, and named in a warning. Raises MemoryError when the
    CPU cannot hold what is on accelerators.
    """
    state: dict[str, Any] = {}
    lost = []
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            state[name] = value
        elif value.device.type == "meta":
            lost.append(name)
        else:
            state[name] = _to_cpu(name, value)
    if lost:
        logger.warning(
            "%d tensors are on the meta device and have no values anywhere: %s",
            len(lost),
            ", ".join(lost[:10]),
        )
    return state


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: DeviceLike = "cpu",
) -> dict[str, Any]:
    """Fill the entries of `state_dict` that belong to one module, offloaded or not, with its real values.

    `module_name` is the module's name in the model, or that of one of its tensors. Values of an offloaded module come to
    `device_to_put_offload`. Returns `state_dict`.
    """
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        values = dict(module.state_dict())
    prefixes = [f"{path}." if path else "" for path in (module_name, module_name.rpartition(".")[0])]
    prefix = next(
        (prefix for prefix in prefixes if any(prefix + name in state_dict for name in values)), None
    )
    if prefix is not None:
        state_dict.update(
            {prefix + name: value for name, value in values.items() if prefix + name in state_dict}
        )
    return state_dict


def _to_cpu(name: str, value: torch.Tensor) -> torch.Tensor:
    try:
        return value.detach().to("cpu")
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise MemoryError(
            f"the CPU has no room for {name!r} ({value.nbytes} bytes); save it shard by shard"
        ) from error
