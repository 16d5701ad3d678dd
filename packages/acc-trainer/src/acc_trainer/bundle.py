"""What prepare was given, by kind and name, and its order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from acc_plugins.pipeline.piped import Piped, any_piped

KINDS = ("model", "optimizer", "scheduler", "dataloader")


@dataclass
class Given:
    """The arguments of one `prepare`: each with its kind (None: hand it back as it is) and whether it goes to the device."""

    objects: list[Any]
    kinds: list[str | None]
    placed: list[bool]
    results: list[Any] = field(default_factory=list)
    # where an object stands again -> where it stands first
    repeats: dict[int, int] = field(default_factory=dict)

    def places(self, kind: str) -> list[int]:
        """Where the objects of one kind stand."""
        return [place for place, its in enumerate(self.kinds) if its == kind]


def sort_given(
    objects: Sequence[Any], device_placement: Sequence[bool | None] | None, default: bool
) -> Given:
    """Sort what `prepare` was given.

    Raises `TypeError` for a pipeline, its model and its optimizers. Raises `ValueError` when `device_placement` has another length, or asks for a placement of something that has none.
    """
    _refuse_pipelines(objects)
    if device_placement is None:
        wanted: Sequence[bool | None] = [None] * len(objects)
    elif isinstance(device_placement, (str, bytes)) or not isinstance(device_placement, Sequence):
        raise ValueError(
            f"device_placement must be a list with one entry per object, got {device_placement!r}"
        )
    elif len(device_placement) != len(objects):
        raise ValueError(
            f"device_placement must have one entry for each of the {len(objects)} objects, got {len(device_placement)}"
        )
    else:
        wanted = device_placement
    return Given(
        objects=list(objects),
        kinds=[kind_of(one) for one in objects],
        placed=[default if one is None else bool(one) for one in wanted],
        results=list(objects),
    )


_PIPELINES = (
    "a pipeline is trained by itself: give pipe.parameters() to an optimizer, call pipe.step(...) and optimizer.step(), and let checkpoints hold both by "
    "accelerator.register_for_checkpointing(pipe.with_optimizer(optimizer))"
)


def _refuse_pipelines(objects: Sequence[Any]) -> None:
    """Each rank has other weights of a pipeline, of which a checkpoint would keep the part of one rank, and call it the whole."""
    for thing in objects:
        if isinstance(thing, Piped):
            raise TypeError(f"prepare cannot take a {type(thing).__name__}: {_PIPELINES}")
        what: Iterable[Any] | None = None
        if isinstance(thing, Optimizer):
            what = [p for group in thing.param_groups for p in group["params"]]
        elif isinstance(thing, nn.Module):
            what = thing.parameters()
        if what is not None and any_piped(what):
            raise TypeError(
                f"prepare cannot take the {type(thing).__name__} of a pipeline's weights: {_PIPELINES}"
            )


def kind_of(thing: Any) -> str | None:
    """One of `KINDS`, or None for what prepare hands back untouched."""
    if isinstance(thing, DataLoader):
        return "dataloader"
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, Optimizer):
        return "optimizer"
    return "scheduler" if _is_scheduler(thing) else None


def _is_scheduler(thing: Any) -> bool:
    """torch's schedulers, and users' own that look like one."""
    if isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
        return True
    methods = ("step", "state_dict", "load_state_dict")
    return hasattr(thing, "optimizer") and all(callable(getattr(thing, name, None)) for name in methods)


def held_in(thing: Any) -> str | None:
    """The kind of an object that `thing`, a container which prepare hands back untouched, holds; None where it holds none."""
    if isinstance(thing, Mapping):
        inside: Iterable[Any] = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        inside = thing
    else:
        return None
    return next((kind for one in inside if (kind := kind_of(one)) is not None), None)
