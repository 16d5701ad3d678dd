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
from .contents import Contents, Run
from .generators import states_to_save
from .gradients import gradients_of, window_is_open
from .layout import CheckpointError
from .manifest import Manifest
from .progress import progress_of
from .samplers import sampler_state
from .together import together


def states_left(run: Run, folder: Path) -> tuple[list[Any], list[int]]:
    """The weights of every model, and which models are still to be written after the hooks.

    A hook may write into `folder`, where the checkpoint is staged, and take weights out of its list.
    """
    with together(run.world, "collecting the weights"):
        states = [run.strategy.state_for_hooks(model) for model in run._models]
        weights = list(states)
        for hook in list(run._save_model_state_pre_hook.values()):
            hook(list(run._models), weights, str(folder))  # a copy: the run keeps its models
        if len(weights) == len(states):
            states, left = weights, list(range(len(states)))
        else:
            left = [index for index, state in enumerate(states) if any(state is kept for kept in weights)]
            if len(left) != len(weights):
                raise CheckpointError(
                    "a hook before saving left weights in its list that are of none of the models"
                )
    # hooks often act on the main process alone, and every rank must take part in the same writes
    return states, run.world.comm.broadcast_object(left) if run._save_model_state_pre_hook else left


def parts_of(
    run: Run, contents: Contents, weights: tuple[list[Any], list[int]], *, leads: bool, safe: bool
) -> Iterator[Part]:
    """The parts of this rank, one after the other, so that one that is written at once is gone before the next is gathered.

    Every rank asks for every state, since strategies and objects may gather it from all; who `leads` a disk writes what is there once.
    """
    states, left = weights
    for index, position in enumerate(left):
        name = layout.numbered("model", index)
        yield from _wanted(run.strategy.model_part(run._models[position], states[position], name, safe))
    for item in contents.optimizers:
        yield from _wanted(run.strategy.optimizer_part(item.thing, item.name))
    progress = progress_of(run, contents)
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
