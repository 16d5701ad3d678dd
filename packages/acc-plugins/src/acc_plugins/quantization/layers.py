"""Which linear layers of a model may be given few bits, and which names stand for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from acc_hooks.tensors import is_plain
from acc_hooks.ties import tied_groups


def linear_layers(model: nn.Module, left_out: Iterable[str] = (), below: str = "") -> dict[str, nn.Linear]:
    """The linear layers inside `model` by path, but those that a name in `left_out` leaves out; a layer of several names has each.

    Of torch's exact class: a subclass has a forward or a weight of its own. `below` is the path of `model` itself.
    """
    left_out = list(left_out)
    prefix = f"{below}." if below else ""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path
        and type(module) is nn.Linear
        and is_plain(module.weight)
        and not is_named(prefix + path, left_out)
    }


def is_named(path: str, names: Iterable[str]) -> bool:
    """Whether one of `names`, each one or several whole parts of a dotted path, stands anywhere in `path`."""
    return any(f".{name}." in f".{path}." for name in names)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """The names of modules to leave as they are: those that share a weight, and the last child, which is the head as a rule.

    Nothing for a base model (one whose `base_model_prefix` names no attribute of it) without shared weights.
    """
    tied = [name.rpartition(".")[0] for group in tied_groups(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return [name for name in dict.fromkeys([*tied, *last]) if name]


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of the first parameter of a module. Raises ValueError where there is none."""
    for first in parameter.parameters():
        return first.device
    raise ValueError(f"{type(parameter).__name__} has no parameter, so it has no device")
