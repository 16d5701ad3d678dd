"""What one rank writes of a checkpoint: the states of its objects, each as a part with the file that it becomes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from acc_plugins.states.part import Part, TorchFilePart
from acc_trainer.__about__ import __version__

from . import layout
from .compared import agreed_progress
from .contents import Contents, Run
from .generators import states_to_save
from .gradients import gradients_of, window_is_open
from .manifest import Manifest
from .progress import progress_of
from .samplers import sampler_state
from .together import together


def states_left(run: Run, folder: Path) -> tuple[list[Any], list[int]]:
    """The weights of every model, and which models are still to be written after the hooks.

    A hook may write into `folder`, where the checkpoint is staged, take weights out of its list, and put others in.
    """
    with together(run.world, "collecting the weights"):
        states = [run.strategy.state_for_hooks(model) for model in run._models]
        weights = list(states)
        for hook in list(run._save_model_state_pre_hook.values()):
            hook(list(run._models), weights, str(folder))  # a copy: the run keeps its models
    if not run._save_model_state_pre_hook:
        return states, list(range(len(states)))
    left = _models_of(weights, states)
    for index, state in zip(left, weights, strict=True):
        states[index : index + 1] = [state]  # at the end where a hook has added it
    # hooks often act on the main process alone, and every rank must take part in the same writes
    left = run.world.comm.broadcast_object(left)
    return states + [{}] * (max(left, default=-1) + 1 - len(states)), left


def _models_of(weights: list[Any], states: list[Any]) -> list[int]:
    """For everything that hooks have left in their list the place of its model.

    A state of the run's own keeps its model; those that a hook has put there are of the models that are left, one after the other, or else of none, and
    come behind all models.
    """
    own = [next((at for at, state in enumerate(states) if state is kept), None) for kept in weights]
    free = [at for at in range(len(states)) if at not in own]
    behind = iter(range(len(states), len(states) + len(weights)))
    left: list[int] = []
    for at in own:
        if at is None:
            at = free.pop(0) if free else next(behind)
        left.append(at)
    return left


def parts_of(
    run: Run, contents: Contents, weights: tuple[list[Any], list[int]], *, leads: bool, safe: bool
) -> Iterator[Part]:
    """The parts of this rank, one after the other, so that one that is written at once is gone before the next is gathered.

    Every rank asks for every state, since strategies and objects may gather it from all; who `leads` a disk writes what is there once.
    """
    states, left = weights
    # the ranks speak about it: before any of them may fail in writing
    progress = agreed_progress(run.world, lambda: progress_of(run, contents))
    for index, position in enumerate(left):
        name = layout.numbered("model", index)
        model = (
            run._models[position] if position < len(run._models) else None
        )  # a state that a hook has added
        yield from _wanted(run.strategy.model_part(model, states[position], name, safe))
    for item in contents.optimizers:
        yield from _wanted(run.strategy.optimizer_part(item.thing, item.name))
    positions, window = progress["positions"], progress["grad_sync"]
    shared: list[tuple[str, Any]] = [
        *((layout.scheduler_file(i), item.thing.state_dict()) for i, item in enumerate(contents.schedulers)),
        *((layout.custom_file(i), item.thing.state_dict()) for i, item in enumerate(contents.custom)),
        *(
            (layout.sampler_file(i), state)
            for i, item in enumerate(contents.loaders)
            if (state := sampler_state(item.thing))
        ),
        *(
            (layout.loader_file(i), state["loader"])
            for i, state in enumerate(positions)
            if state and "loader" in state
        ),
    ]
    if run.precision.scaler is not None:
        shared.append((layout.SCALER, run.precision.state_dict()))
    own: list[tuple[str, Any]] = [
        (layout.random_file(run.world.rank), states_to_save(run.step)),
        (layout.progress_file(run.world.rank), progress),
    ]
    if window_is_open(window):
        own.append((layout.gradients_file(run.world.rank), gradients_of(run, contents)))
    for file, state in [*(shared if leads else ()), *own]:
        yield TorchFilePart(name=Path(file).stem, suffix=Path(file).suffix, state=state)


def manifest_of(run: Run, contents: Contents, target: Path, metric: float | None) -> Manifest:
    """What the manifest says of the run at this moment; its files are not known yet."""
    positions = [loader.position for loader in run._dataloaders if hasattr(loader, "position")]
    return Manifest(
        versions={
            "acc-trainer": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        world_size=run.world.size,
        step=int(run.step),
        epoch=positions[0].state_dict().get("epoch") if positions else None,
        iteration=layout.number_of(target.name)
        if run.project_configuration.automatic_checkpoint_naming
        else None,
        saved_at=time.time(),
        metric=metric,
        objects=contents.described(),
    )


def _wanted(part: Part | None) -> list[Part]:
    return [] if part is None else [part]
