"""What a load will hand out beside the weights: all of it is read and checked before anything of the run is touched."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acc_bigmodel  # lazy: what reads files is loaded when it is first used
from acc_ops.random import restore_rng

from . import layout
from .contents import Contents, Run
from .gradients import Gradients, check_gradients, give_gradients, window_is_open
from .layout import CheckpointError
from .manifest import Manifest
from .torch_files import check_file, read_file, read_random


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Everything that is small, as it was saved; None where the checkpoint says nothing and the run keeps what it has."""

    schedulers: list[Any]
    scaler: Any | None
    custom: list[Any]
    step: int | None
    positions: list[Any]
    window: Mapping[str, Any] | None
    gradients: Gradients
    random: Mapping[str, Any] | None  # empty when it could not be read


def check_files(contents: Contents, folder: Path, run: Run) -> None:
    """Every file that will be read is there and can be read; for checkpoints without a manifest this is all there is to check."""
    needed = [f"{item.name}.bin" for item in contents.optimizers]
    needed += [layout.scheduler_file(index) for index in range(len(contents.schedulers))]
    present = len(list(folder.glob("custom_checkpoint_*.pkl")))
    if present != len(contents.custom):
        raise CheckpointError(
            f"the checkpoint {folder} holds {present} registered objects, this run has {len(contents.custom)}: "
            f"{[item.kind_of for item in contents.custom]}; register the same objects in the same order"
        )
    for name in needed:
        if not _exists(folder, name):
            raise CheckpointError(f"the checkpoint {folder} is not whole: {name} is missing")
    for item in contents.optimizers:
        if (folder / f"{item.name}.bin").is_file():
            check_file(folder / f"{item.name}.bin")
    if run.precision.scaler is not None and not (folder / layout.SCALER).is_file():
        warnings.warn(
            f"{folder} holds no {layout.SCALER}: the gradient scaler keeps its present scale", stacklevel=5
        )


def check_weights(models: list[Any], folder: Path) -> None:
    """CheckpointError unless there are weights for every one of `models` that can be read."""
    for index in range(len(models)):
        name = layout.numbered("model", index)
        if any((folder / file).is_file() for file in layout.weight_files(name)):
            try:
                acc_bigmodel.load_weights(folder, name)  # safetensors are mapped: only the header is read
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"the checkpoint {folder} is not whole: the weights of {name} cannot be read ({error})"
                ) from error
        elif not (folder / name).is_dir():
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: it has no weights for {name} (looked for "
                f"{', '.join(layout.weight_files(name))})"
            )


def read_pending(
    run: Run, contents: Contents, folder: Path, manifest: Manifest | None, load_kwargs: Mapping[str, Any]
) -> Pending:
    """Read what this rank will hand out. CheckpointError names the file; the random state alone may be missing or unreadable."""
    scaler = folder / layout.SCALER
    custom_kwargs = {"weights_only": False, **load_kwargs}
    progress = {} if manifest is None else _progress(run, folder, manifest)
    window = progress.get("grad_sync")
    gradients: Gradients = {}
    if window is not None and window_is_open(window):
        file = folder / layout.gradients_file(run.world.rank)
        gradients = read_file(file, {})
        check_gradients(run, contents, gradients, file)
    random = _random(run, folder)
    step = progress.get("step") if random is None else random.get("step", progress.get("step"))
    return Pending(
        schedulers=[
            read_file(folder / layout.scheduler_file(index), load_kwargs)
            for index in range(len(contents.schedulers))
        ],
        scaler=read_file(scaler, load_kwargs)
        if run.precision.scaler is not None and scaler.is_file()
        else None,
        custom=[
            read_file(folder / layout.custom_file(index), custom_kwargs)
            for index in range(len(contents.custom))
        ],
        step=None if step is None else int(step),
        positions=list(progress.get("positions", ())),
        window=window,
        gradients=gradients,
        random=random,
    )


def hand_out(run: Run, contents: Contents, pending: Pending) -> None:
    """Give everything to its owner; the random generators come last."""
    for item, state in zip(contents.schedulers, pending.schedulers, strict=True):
        item.thing.load_state_dict(state)
    if pending.scaler is not None:
        run.precision.load_state_dict(pending.scaler)
    for item, state in zip(contents.custom, pending.custom, strict=True):
        item.thing.load_state_dict(state)
    for item, state in zip(contents.loaders, pending.positions, strict=False):
        position = getattr(item.thing, "position", None)
        if position is not None and state is not None:
            position.load_state_dict(state)
    if pending.window is not None:
        run.grad_sync.load_state_dict(pending.window)
        give_gradients(run, contents, pending.gradients)
    if pending.step is not None:
        run.step = pending.step
    if pending.random:
        _restore(pending.random)


def _exists(folder: Path, name: str) -> bool:
    """A file, or the folder that a sharding strategy writes under the same stem."""
    return (folder / name).is_file() or (folder / name.removesuffix(".bin")).is_dir()


def _progress(run: Run, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Where this rank stood; rank 0's place, without its half window, when another number of ranks saved."""
    if manifest.world_size == run.world.size:
        return dict(read_file(folder / layout.progress_file(run.world.rank), {}))
    progress = dict(read_file(folder / layout.progress_file(0), {}))
    window = dict(progress.get("grad_sync", {}))
    lost = ""
    if window_is_open(window):
        lost = "; the checkpoint lies inside an accumulation window, whose micro-batches so far are lost: the next one begins a new window"
        progress["grad_sync"] = {**window, "index": 0, "sync": True, "broken": False}
    warnings.warn(
        f"{folder} was saved by {manifest.world_size} processes, now there are {run.world.size}: "
        f"random generators and positions inside an epoch cannot be the same{lost}",
        stacklevel=5,
    )
    return progress


def _random(run: Run, folder: Path) -> dict[str, Any] | None:
    path = folder / layout.random_file(run.world.rank)
    if path.is_file():
        return read_random(path)
    warnings.warn(f"{folder} holds no {path.name}: the random generators go on as they are", stacklevel=5)
    return None


def _restore(saved: Mapping[str, Any]) -> None:
    """A state that does not fit is said: the rest of the run is loaded by now."""
    try:
        restore_rng({name: state for name, state in saved.items() if name != "step"})  # warns of missing ones
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        warnings.warn(
            f"not all random generators could be restored ({error}): they go on as they are", stacklevel=5
        )
