"""What a checkpoint of a run consists of: its objects by kind and name, in the order of `prepare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from acc_ops.world import World

from .layout import CheckpointError, class_name, numbered

KINDS = {
    "models": "model",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "loaders": "loader",
    "custom": "custom",
}


class Run(Protocol):
    """What `save_state` and `load_state` use of an Accelerator."""

    step: int
    world: World
    strategy: Any
    precision: Any
    grad_sync: Any
    project_configuration: Any
    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: Mapping[Any, Any]
    _load_model_state_pre_hook: Mapping[Any, Any]


class Item(NamedTuple):
    """One object to save: its name in the checkpoint, its class, and itself."""

    name: str
    kind_of: str
    thing: Any


class Contents(NamedTuple):
    """Everything of a run that a checkpoint holds."""

    models: list[Item]
    optimizers: list[Item]
    schedulers: list[Item]
    loaders: list[Item]
    custom: list[Item]

    def described(self) -> dict[str, list[dict[str, str]]]:
        """Names and classes by kind, for the manifest."""
        return {
            kind: [{"name": item.name, "class": item.kind_of} for item in getattr(self, kind)]
            for kind in self._fields
        }


def collect(run: Run) -> Contents:
    """The objects of `run` by name."""
    unwrap = run.strategy.unwrap
    return Contents(
        models=_items("models", run._models, [class_name(unwrap(model)) for model in run._models]),
        optimizers=_items(
            "optimizers", run._optimizers, [_wrapped_class(thing, "optimizer") for thing in run._optimizers]
        ),
        schedulers=_items(
            "schedulers", run._schedulers, [_wrapped_class(thing, "scheduler") for thing in run._schedulers]
        ),
        loaders=_items("loaders", run._dataloaders, [class_name(thing) for thing in run._dataloaders]),
        custom=_items("custom", run._custom_objects, [class_name(thing) for thing in run._custom_objects]),
    )


def check_same_objects(contents: Contents, saved: Mapping[str, list[dict[str, str]]], folder: object) -> None:
    """CheckpointError, listing both, when the run has other objects than the checkpoint, or the same in another order."""
    for kind, items in contents._asdict().items():
        if kind not in saved:
            continue
        theirs = [entry["class"] for entry in saved[kind]]
        ours = [item.kind_of for item in items]
        shuffled = ours != theirs and Counter(ours) == Counter(theirs)
        if len(ours) != len(theirs) or (shuffled and kind != "loaders"):
            raise CheckpointError(
                f"the {kind} of this run are not those of the checkpoint {folder}{' in the same order' if shuffled else ''}: "
                f"it holds {theirs}, this run has {ours}; prepare and register the same objects in the same order"
            )


def _items(kind: str, things: Sequence[Any], classes: Sequence[str]) -> list[Item]:
    return [
        Item(numbered(KINDS[kind], index), kind_of, thing)
        for index, (thing, kind_of) in enumerate(zip(things, classes, strict=True))
    ]


def _wrapped_class(thing: Any, attribute: str) -> str:
    """The class of the user's own object inside a wrapper of ours."""
    return class_name(getattr(thing, attribute, thing))
