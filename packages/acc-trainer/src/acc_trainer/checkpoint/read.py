"""Loading: the whole checkpoint is checked on every rank before anything of the run is touched."""

from __future__ import annotations

import codecs
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from acc_ops.optional import is_available, require
from acc_ops.random import restore_rng

from . import layout
from .contents import Contents, Run, check_same_objects, collect
from .layout import CheckpointError
from .manifest import Manifest, check_whole, newest_whole, read_manifest
from .rotate import next_number, numbers_in
from .together import agree, together


def load_state(
    accelerator: Run,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Load what `save_state` wrote: from `input_dir`, or from the newest whole automatically named folder.

    Sizes of all files, and that the run has the same objects, are checked on every rank before anything is touched.
    `load_kwargs` go to torch.load; `map_location` (None, "cpu", "on_device") and `strict` are taken from `kwargs`. A
    checkpoint without a manifest, as accelerate writes it, is loaded with a warning. Registered objects are unpickled:
    load only what you trust.

    CheckpointError for a folder that is not whole, for other objects than those saved, and when ranks disagree;
    ValueError when there is no folder; TypeError for other arguments. A failure on one rank raises on all.
    """
    world, project = accelerator.world, accelerator.project_configuration
    with together(world, "looking for the checkpoint"):
        map_location = _map_location(accelerator, kwargs.pop("map_location", None))
        strict = kwargs.pop("strict", True)
        if kwargs:
            raise TypeError(f"load_state does not know {', '.join(kwargs)}; known: map_location, strict")
        folder = _folder(project, input_dir)
        manifest = _checked(folder)
    agree(world, (folder.name, manifest.step if manifest else None), "the checkpoint to load (folder, step)")
    models = list(accelerator._models)
    with together(world, f"checking {folder}"):
        contents = collect(accelerator)
        if manifest is not None:
            check_same_objects(contents, manifest.objects, folder)
        _check_files(contents, folder, accelerator)
        for hook in list(accelerator._load_model_state_pre_hook.values()):
            hook(models, str(folder))  # may load models itself, and take them out of the list
        _check_weights(models, folder)
    with together(world, f"loading {folder}"):
        for index, model in enumerate(models):
            accelerator.strategy.load_model(
                model, str(folder), layout.numbered("model", index), map_location=map_location, strict=strict
            )
        _load_rest(accelerator, contents, folder, map_location, dict(load_kwargs or {}))
        _load_progress(accelerator, contents, folder, manifest)
    if project.automatic_checkpoint_naming:
        project.iteration = next_number(layout.automatic_folder(project), project.iteration)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give `obj` what `save_custom_state` wrote. The file is unpickled: load only what you trust."""
    obj.load_state_dict(_read(Path(path, layout.custom_file(index)), {"weights_only": False}))


def _map_location(run: Run, asked: Any) -> Any:
    if asked not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location must be None, 'cpu' or 'on_device', got {asked!r}")
    return run.world.device if asked == "on_device" else "cpu"


def _folder(project: layout.Project, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir is not None:
        folder = Path(input_dir)
        parked = layout.parked_of(Path(os.path.realpath(folder)))
        if not folder.is_dir() and parked.is_dir():  # a save was killed between two renames
            return parked
        if not folder.is_dir():
            raise ValueError(f"there is no checkpoint folder {folder}")
        return folder
    if not project.automatic_checkpoint_naming:
        raise ValueError(
            "load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    home = layout.automatic_folder(project)
    newest = newest_whole(home)
    if newest is not None:
        return newest
    without_manifest = [
        n for n in numbers_in(home) if not (home / layout.automatic_name(n) / layout.MANIFEST).exists()
    ]
    if without_manifest:
        return home / layout.automatic_name(without_manifest[-1])
    raise ValueError(f"there is no whole checkpoint in {home}")


def _checked(folder: Path) -> Manifest | None:
    if read_manifest(folder) is not None:
        return check_whole(folder)
    warnings.warn(
        f"{folder} has no {layout.MANIFEST}: it was not written by save_state of this library, "
        "so nothing can be said about it being whole",
        stacklevel=4,
    )
    return None


def _check_files(contents: Contents, folder: Path, run: Run) -> None:
    """Every file that will be read is there; for checkpoints without a manifest this is all that can be checked."""
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
    if run.precision.scaler is not None and not (folder / layout.SCALER).is_file():
        warnings.warn(
            f"{folder} holds no {layout.SCALER}: the gradient scaler keeps its present scale", stacklevel=5
        )


def _exists(folder: Path, name: str) -> bool:
    """A file, or the folder that a sharding strategy writes under the same stem."""
    return (folder / name).is_file() or (folder / name.removesuffix(".bin")).is_dir()


def _check_weights(models: list[Any], folder: Path) -> None:
    for index in range(len(models)):
        name = layout.numbered("model", index)
        if (
            not any((folder / file).is_file() for file in layout.weight_files(name))
            and not (folder / name).is_dir()
        ):
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: it has no weights for {name} (looked for "
                f"{', '.join(layout.weight_files(name))})"
            )


def _load_rest(
    run: Run, contents: Contents, folder: Path, map_location: Any, load_kwargs: dict[str, Any]
) -> None:
    for item in contents.optimizers:
        run.strategy.load_optimizer(item.thing, str(folder), item.name, map_location=map_location)
    for index, item in enumerate(contents.schedulers):
        item.thing.load_state_dict(_read(folder / layout.scheduler_file(index), load_kwargs))
    if run.precision.scaler is not None and (folder / layout.SCALER).is_file():
        run.precision.load_state_dict(_read(folder / layout.SCALER, load_kwargs))
    for index, item in enumerate(contents.custom):
        state = _read(folder / layout.custom_file(index), {"weights_only": False, **load_kwargs})
        item.thing.load_state_dict(state)


def _load_progress(run: Run, contents: Contents, folder: Path, manifest: Manifest | None) -> None:
    """Positions, accumulation window, step and, last of all, the random generators of this rank."""
    rank = run.world.rank
    own = folder / layout.progress_file(rank)
    progress = (
        _read(own if own.is_file() else folder / layout.progress_file(0), {}) if manifest is not None else {}
    )
    if manifest is not None and manifest.world_size != run.world.size:
        warnings.warn(
            f"{folder} was saved by {manifest.world_size} processes, now there are {run.world.size}: "
            "random generators and positions inside an epoch cannot be the same",
            stacklevel=4,
        )
    for item, state in zip(contents.loaders, progress.get("positions", ()), strict=False):
        position = getattr(item.thing, "position", None)
        if position is not None and state is not None:
            position.load_state_dict(state)
    if "grad_sync" in progress:
        run.grad_sync.load_state_dict(progress["grad_sync"])
    random = folder / layout.random_file(rank)
    if not random.is_file():
        warnings.warn(
            f"{folder} holds no {random.name}: the random generators go on as they are", stacklevel=4
        )
        run.step = int(progress.get("step", run.step))
        return
    state = _read_random(random)
    run.step = int(state.pop("step", run.step))
    missing = restore_rng(state)
    if missing:
        warnings.warn(f"{random} holds no random state for {', '.join(missing)}", stacklevel=4)


def _read_random(path: Path) -> dict[str, Any]:
    """The random states of one rank; accelerate's hold NumPy arrays, which torch trusts only when told to."""
    trusted: list[Any] = []
    if is_available("numpy"):
        numpy = require("numpy", "the random state of NumPy in a checkpoint")
        rebuild = numpy.zeros(1).__reduce__()[0]
        both = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
        trusted = [*both, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    try:
        with torch.serialization.safe_globals([*trusted, codecs.encode]):
            return dict(_read(path, {}))
    except CheckpointError as error:
        warnings.warn(f"the random generators go on as they are: {error}", stacklevel=5)
        return {}


def _read(path: Path, load_kwargs: Mapping[str, Any]) -> Any:
    try:
        return torch.load(path, **{"map_location": "cpu", "weights_only": True, **load_kwargs})
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that could run code when they are loaded: {str(error).splitlines()[0]} "
            "If you trust it: load_state(..., load_kwargs={'weights_only': False})"
        ) from error
