"""Tied parameters under the names that device maps and checkpoints need: find them, tie them again, check them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from acc_bigmodel.device_map import expand_device_map
from acc_hooks.tensors import get_tensor, put_tensor
from acc_hooks.ties import tied_groups

logger = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The groups of parameter names that refer to one tensor, each sorted; linear in the number of names.

    Keyword arguments are accepted because older code passes them; they have no effect.
    """
    for name in kwargs:
        logger.warning("find_tied_parameters takes no option %r; it has no effect", name)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = tied_groups(model)
    for group in groups:  # in place: a copy of each would wake the garbage collector
        if not parameters.issuperset(group):
            group[:] = [name for name in group if name in parameters]
        group.sort()
    return sorted(group for group in groups if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make all names of each group the first of its tensors that has values (is off the meta device).

    Raises AttributeError or KeyError for a name that the model does not have.
    """
    for group in tied_params:
        tensors = [get_tensor(model, name) for name in group]
        source = next(
            (tensor for tensor in tensors if tensor is not None and tensor.device.type != "meta"), None
        )
        if source is None:
            continue
        for name, tensor in zip(group, tensors, strict=True):
            if tensor is not source:
                path, _, local = name.rpartition(".")
                put_tensor(model.get_submodule(path), local, source)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model in the style of transformers says that it ties weights."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    return bool(
        (embeddings is not None and getattr(config, "tie_word_embeddings", False))
        or getattr(config, "tie_encoder_decoder", False)
        or any(hasattr(module, "_tie_weights") for module in model.modules())
    )


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Log a warning for each group whose names `device_map` sends to different devices.

    Raises ValueError for a name that the map does not cover.
    """
    for group in tied_params:
        devices = expand_device_map(device_map, group)
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Each device holds a copy of its own; put the modules on "
                "one device to share it.",
                ", ".join(f"{name} on {device}" for name, device in devices.items()),
            )
