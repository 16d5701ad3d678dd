"""Saving: contents by name, staged by every rank, committed by one, and only then old checkpoints pruned."""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from acc_ops.random import capture_rng
from acc_ops.world import World, current_world
from acc_trainer.__about__ import __version__

from . import commit, layout
from .contents import Contents, Run, collect
from .gradients import gradients_of, window_is_open
from .layout import CheckpointError
from .manifest import Manifest, files_of
from .meeting import meet
from .rotate import prune
from .together import agree, together


def save_state(
    accelerator: Run,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    **kwargs: Any,
) -> str:
    """Save the whole run and return the folder: models, optimizers, schedulers, scaler, loaders, RNG, registered objects.

    The folder appears whole or not at all; what was there before stays until then. With automatic naming it is
    PROJECT_DIR/checkpoints/checkpoint_N, and checkpoints beyond `total_limit` are deleted afterwards. Every rank calls it.

    Rank 0 waits `wait_s` seconds (60 unless given) for the others to call it too, and raises CheckpointError when they do not.

    A failure on one rank raises on all: the error itself there, CheckpointError elsewhere. TypeError without `output_dir`
    and automatic naming; ValueError for an empty name, and when the folder of the next automatic name exists.
    """
    world, project = accelerator.world, accelerator.project_configuration
    meet(world, "save_state", kwargs.pop("wait_s", None))
    if kwargs:
        warnings.warn(f"save_state: {', '.join(kwargs)} had no effect, no engine takes them", stacklevel=2)
    with together(world, "choosing the folder"):
        shown = _target(project, output_dir)
        target = Path(os.path.realpath(shown))  # a link stays a link to the folder that is replaced
        commit.check_target(target)
    agree(world, str(target) if world.num_nodes == 1 else target.name, "the folder to save into")
    with _Disk(world, target) as staging:
        contents = collect(accelerator)
        states, left = _states_left(accelerator, staging.path)
        with together(world, f"writing {target}"):
            for index, position in enumerate(left):
                accelerator.strategy.save_model(
                    accelerator._models[position],
                    states[position],
                    str(staging.path),
                    layout.numbered("model", index),
                    safe_serialization,
                )
            _write_rest(accelerator, contents, staging)
        with together(world, f"finishing {target}"):
            if staging.leads:
                manifest = _manifest(accelerator, contents, staging.path, target)
                commit.finish(staging.path, target, manifest)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
        with together(world, f"deleting checkpoints older than {target}"):
            if staging.leads:
                prune(target.parent, target, project.total_limit)
    return str(shown)


def save_custom_state(
    obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write `obj.state_dict()` as `custom_checkpoint_{index}.pkl` into the folder `path`, on the rank (or ranks) that write.

    Every rank asks for the state, since an object may gather it from all of them.
    """
    world = current_world()
    state = obj.state_dict()
    if world.is_local_main if save_on_each_node else world.is_main:
        torch.save(state, Path(path, layout.custom_file(index)))


class _Disk:
    """The staging folder on the disk that this rank sees, and whether this rank leads the ranks that see the same disk.

    Rank 0 leads on its disk. On a machine that does not see rank 0's staging folder, the first process leads.
    Leaving with an error takes the staging folder away.
    """

    def __init__(self, world: World, target: Path) -> None:
        self.world = world
        self.target = target
        self.path = layout.staging_of(target)
        self.leads = False

    def __enter__(self) -> _Disk:
        world = self.world
        with together(world, f"making room for {self.target}"):
            if world.is_main:
                commit.begin(self.target)
                self.leads = True
        with together(world, f"making room for {self.target} on every machine"):
            self.leads = self.leads or (world.is_local_main and not self.path.is_dir())
        with together(world, f"making room for {self.target} on every machine"):
            if self.leads and not world.is_main:
                commit.begin(self.target)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self.leads:
            shutil.rmtree(self.path, ignore_errors=True)


def _target(project: layout.Project, output_dir: str | os.PathLike[str] | None) -> Path:
    if project.automatic_checkpoint_naming:
        if output_dir is not None:
            warnings.warn(
                f"save_state: output_dir {output_dir} has no effect with automatic_checkpoint_naming",
                stacklevel=3,
            )
        target = layout.automatic_folder(project) / layout.automatic_name(project.iteration)
        if os.path.lexists(target):
            raise ValueError(
                f"{target} exists already: load_state() first, so that the numbering goes on after the newest checkpoint, "
                "or choose another project_dir"
            )
    elif output_dir is None:
        raise TypeError(
            "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    elif output_dir == "":
        raise ValueError("save_state: output_dir is empty; name the folder to write")
    else:
        target = Path(output_dir)
    return target


def _states_left(run: Run, staging: Path) -> tuple[list[Any], list[int]]:
    """The weights of every model, and which models are still to be written after the hooks.

    A hook may write into the staging folder and take weights out of its list.
    """
    with together(run.world, "collecting the weights"):
        states = [run.strategy.state(model) for model in run._models]
        weights = list(states)
        for hook in list(run._save_model_state_pre_hook.values()):
            hook(list(run._models), weights, str(staging))  # a copy: the run keeps its models
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


def _write_rest(run: Run, contents: Contents, staging: _Disk) -> None:
    folder, writes = staging.path, staging.leads
    for item in contents.optimizers:
        run.strategy.save_optimizer(item.thing, str(folder), item.name)
    # every rank asks for every state, since an object may gather it from all; the leader writes
    schedulers = [item.thing.state_dict() for item in contents.schedulers]
    customs = [item.thing.state_dict() for item in contents.custom]
    positions = [_position(item.thing) for item in contents.loaders]
    scaler = None if run.precision.scaler is None else run.precision.state_dict()
    if writes:
        for index, state in enumerate(schedulers):
            torch.save(state, folder / layout.scheduler_file(index))
        for index, state in enumerate(customs):
            torch.save(state, folder / layout.custom_file(index))
        for index, state in enumerate(positions):
            if state is not None and "loader" in state:
                torch.save(state["loader"], folder / layout.loader_file(index))
        if scaler is not None:
            torch.save(scaler, folder / layout.SCALER)
    rank = run.world.rank
    torch.save({"step": run.step, **capture_rng()}, folder / layout.random_file(rank))
    window = run.grad_sync.state_dict()
    progress = {"step": run.step, "grad_sync": window, "positions": positions}
    torch.save(progress, folder / layout.progress_file(rank))
    if window_is_open(window):
        torch.save(gradients_of(run, contents), folder / layout.gradients_file(rank))


def _position(loader: Any) -> dict[str, Any] | None:
    position = getattr(loader, "position", None)
    return None if position is None else position.state_dict()


def _manifest(run: Run, contents: Contents, folder: Path, target: Path) -> Manifest:
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
        objects=contents.described(),
        files=files_of(folder),
    )
