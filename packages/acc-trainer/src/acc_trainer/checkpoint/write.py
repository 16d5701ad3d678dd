"""Saving: contents by name, staged by every rank, committed by one, and only then old checkpoints pruned."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acc_ops.callers import warn_caller
from acc_ops.world import current_world

from . import commit, layout
from .background import Background, finish_save
from .contents import Run, collect
from .manifest import metric_of
from .meeting import meet
from .parts import manifest_of, parts_of, states_left
from .policy import policy_of
from .together import agree, together
from .transaction import Transaction


def save_state(
    accelerator: Run,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    **kwargs: Any,
) -> Path:
    """Save the whole run and return the folder: models, optimizers, schedulers, scaler, loaders, RNG, registered objects.

    The folder appears whole or not at all; what was there before stays until then. With automatic naming it is
    PROJECT_DIR/checkpoints/checkpoint_N, and checkpoints that neither `total_limit` nor `keep` wants are deleted afterwards.
    Every rank calls it. `metric` (one number, the same on all ranks) is written down: `CheckpointPolicy(best=...)` looks at it.

    With `blocking=False` the state is copied, and written by a thread; a failure of that is raised by the next call that waits for it. It waits
    for an earlier such save, and raises its failure.

    Rank 0 waits `wait_s` seconds (60 unless given) for the others to call it too, and raises CheckpointError when they do not.

    A failure on one rank raises on all: the error itself there, CheckpointError elsewhere. TypeError for a keyword that is not known (those of
    DeepSpeed's save_checkpoint are, and warn where it does not train), and without `output_dir` and automatic naming; ValueError for an empty name, and when the folder of the next automatic name exists.
    """
    finish_save(accelerator)
    world, project = accelerator.world, accelerator.project_configuration
    meet(world, "save_state", kwargs.pop("wait_s", None))
    wish = _agreed(accelerator, output_dir, kwargs)
    target = wish.target
    policy = policy_of(project) if project.automatic_checkpoint_naming else None
    transaction, number = Transaction(target), project.iteration

    def number_again() -> None:
        if not (
            transaction.is_committed or os.path.lexists(target)
        ):  # it may be there though not all went well
            project.iteration = number

    try:
        transaction.begin(world)
        with nullcontext() if wish.blocking else _garbage_later():
            contents = collect(accelerator)
            weights = states_left(accelerator, transaction.folder)
            parts = parts_of(accelerator, contents, weights, leads=transaction.leads, safe=safe_serialization)
            with together(world, "describing the run"):
                manifest = manifest_of(accelerator, contents, target, wish.metric)
            if not wish.blocking:
                background = _background_of(accelerator)
                with together(world, f"copying the state for {target}"):
                    copies = background.copies(parts)
        if project.automatic_checkpoint_naming:
            project.iteration = number + 1
        if wish.blocking:
            transaction.write(world, parts, manifest, policy)
        else:
            background.start(
                str(target), lambda apart: transaction.write(apart, copies, manifest, policy), number_again
            )
    except BaseException:
        if wish.blocking or not _is_written_beside(accelerator):
            transaction.discard()
            number_again()
        raise
    return Path(wish.shown)


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


class _Wish(NamedTuple):
    """What a save was asked for, the same on all ranks: the folder as it was named and as it is, and the options."""

    shown: str
    target: Path
    metric: float | None
    blocking: bool


def _agreed(run: Run, output_dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> _Wish:
    """Checked, and compared between the ranks, before anything is written."""
    world = run.world
    metric, blocking = options.pop("metric", None), options.pop("blocking", True)
    with together(world, "choosing the folder"):
        _check_options(options)
        if not isinstance(blocking, bool):
            raise TypeError(f"save_state: blocking must be True or False, got {blocking!r}")
        shown = _target(run.project_configuration, output_dir)
        target = Path(os.path.realpath(shown))  # a link stays a link to the folder that is replaced
        commit.check_target(target)
        metric = metric_of(metric)
    place = str(target) if world.num_nodes == 1 else target.name
    agree(world, (place, metric), "the folder to save into, and the metric (gather it first)")
    agree(world, blocking, "blocking, an argument of save_state")
    return _Wish(str(shown), target, metric, blocking)


# what DeepSpeed's save_checkpoint takes, which gets the keywords of save_state where it trains
_OF_DEEPSPEED = ("tag", "client_state", "save_latest", "exclude_frozen_parameters")


def _check_options(options: Iterable[str]) -> None:
    """TypeError for a keyword that nobody takes; a warning for one of an engine that does not train this run."""
    unknown = [name for name in options if name not in _OF_DEEPSPEED]
    if unknown:
        raise TypeError(
            f"save_state does not know {', '.join(unknown)}; known: blocking, metric, wait_s, and for DeepSpeed {', '.join(_OF_DEEPSPEED)}"
        )
    for name in options:
        warn_caller(f"save_state: {name} had no effect, no engine of this run takes it")


@contextmanager
def _garbage_later() -> Iterator[None]:
    """Leave Python's search for garbage out for a while: thousands of tensors set it off, and it takes longer than their copy."""
    searches = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if searches:
            gc.enable()


def _background_of(run: Run) -> Background:
    if run._background is None:
        run._background = Background(run.world)
    background: Background = run._background
    return background


def _is_written_beside(run: Run) -> bool:
    """Whether a thread has the save by now: an interrupt of the call does not end it."""
    return run._background is not None and run._background.is_writing


def _target(project: layout.Project, output_dir: str | os.PathLike[str] | None) -> Path:
    if project.automatic_checkpoint_naming:
        if output_dir is not None:
            warn_caller(f"save_state: output_dir {output_dir} has no effect with automatic_checkpoint_naming")
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
