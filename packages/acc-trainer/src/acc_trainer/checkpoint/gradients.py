"""The gradients of an open accumulation window: of one rank, by parameter name, so that a resumed window is the same window.

[Note: half a window] Between the micro-batches of a window a parameter's `grad` is this rank's own sum, which no other rank has
and no other file holds. A checkpoint taken there keeps it, one file per rank. Another number of ranks cannot share the sums out
again: the half window is then left out, and the load says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contents import Contents, Run
from .layout import CheckpointError

Gradients = dict[str, dict[str, Tensor]]  # object name -> parameter name -> gradient


def window_is_open(grad_sync: Mapping[str, Any]) -> bool:
    """Whether the state of a `GradSync` lies between two micro-batches of one window, or behind one that was broken off: a step may still come."""
    return int(grad_sync.get("index", 0)) > 0 or bool(grad_sync.get("broken", False))


def gradients_of(run: Run, contents: Contents) -> Gradients:
    """This rank's gradients as they are; parameters without one are left out."""
    found: Gradients = {}
    for owner, name, parameter in _parameters(run, contents):
        if parameter.grad is not None:
            found.setdefault(owner, {})[name] = parameter.grad.detach()
    return found


def check_gradients(run: Run, contents: Contents, saved: Gradients, path: Path) -> None:
    """CheckpointError when the run has no parameter, or one of another shape, for a saved gradient."""
    shapes = {(owner, name): tuple(p.shape) for owner, name, p in _parameters(run, contents)}
    for owner, named in saved.items():
        for name, gradient in named.items():
            have = shapes.get((owner, name))
            if have != tuple(gradient.shape):
                what = f"one of shape {have}" if have is not None else "no such parameter"
                raise CheckpointError(
                    f"{path} holds a gradient of shape {tuple(gradient.shape)} for {name} of {owner}, this run has {what}"
                )


def give_gradients(run: Run, contents: Contents, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Every parameter gets its saved gradient, or None; a gradient that is there (a view of a DDP bucket) is overwritten in place."""
    for owner, name, parameter in _parameters(run, contents):
        gradient = saved.get(owner, {}).get(name)
        if gradient is None:
            parameter.grad = None
        elif _can_overwrite(parameter.grad, gradient):
            parameter.grad.detach().copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _can_overwrite(present: Tensor | None, gradient: Tensor) -> bool:
    return present is not None and present.layout == gradient.layout == torch.strided


def _parameters(run: Run, contents: Contents) -> Iterator[tuple[str, str, Any]]:
    """Parameters once each: of models by their own names, others that only an optimizer knows by their place in it."""
    seen: set[int] = set()
    for item in contents.models:
        for name, parameter in run.strategy.unwrap(item.thing).named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield item.name, name, parameter
    for item in contents.optimizers:
        groups = getattr(item.thing, "param_groups", ())
        for place, parameter in enumerate(p for group in groups for p in group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield item.name, str(place), parameter
