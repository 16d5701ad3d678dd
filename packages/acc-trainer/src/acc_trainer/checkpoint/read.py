"""Loading: the whole checkpoint is checked on every rank before anything of the run is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from acc_ops.world import World

from . import layout
from .background import finish_save
from .choose import candidates, first_unchanged
from .compared import compared
from .contents import Run, check_same_objects, collect, matched
from .listing import CheckpointInfo
from .meeting import meet
from .pending import check_files, giving, hand_out, open_optimizers, open_weights, read_pending
from .replaced import again_while_replaced, unless_replaced
from .rotate import next_number
from .together import agree, together
from .torch_files import read_file


def load_state(
    accelerator: Run,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Load what `save_state` wrote: from `input_dir`, or from the newest whole automatically named folder.

    Before anything is touched, every rank checks that the run has the same objects, that each file is there and can be read, has the size that was
    written, and that names, shapes and groups of all weights and optimizers fit. `checksums=True` compares their bytes too, each file once per machine (which takes three times
    as long as the loading itself).
    `load_kwargs` go to torch.load; `map_location` (None, "cpu", "on_device") and `strict` are taken from `kwargs`. A checkpoint without a
    manifest, as accelerate writes it, is loaded with a warning. What holds more than plain data and tensors is refused, unless
    `load_kwargs={"weights_only": False}`, for files that you trust. Rank 0 waits `wait_s` seconds (60 unless given) for the others to call it too.

    Newest is the highest step, then the highest number. Where no folder was named and `checksums` find that bytes of the newest have changed,
    the one before it is loaded, and a warning says so. When another process saves into the folder meanwhile, the load begins again.

    CheckpointError for a folder that is not whole, for other objects than those saved (for other weights and parameters one that is a ValueError,
    too), when the disk does not answer, and when ranks
    disagree or do not come; ValueError when there is no folder; TypeError for other arguments. A failure on one rank raises on all.
    """
    finish_save(accelerator)
    world, project = accelerator.world, accelerator.project_configuration
    meet(world, "load_state", kwargs.pop("wait_s", None))
    with together(world, "looking for the checkpoint"):
        map_location = map_location_of(world, kwargs.pop("map_location", None))
        strict, checksums = kwargs.pop("strict", True), kwargs.pop("checksums", False)
        if kwargs:
            known = "checksums, map_location, strict, wait_s"
            raise TypeError(f"load_state does not know {', '.join(kwargs)}; known: {known}")
        if not isinstance(load_kwargs, (Mapping, type(None))):
            raise TypeError(f"load_kwargs must be a dict of arguments for torch.load, got {load_kwargs!r}")
    agree(world, _told(load_kwargs, checksums, map_location, strict), "the arguments of load_state")
    again_while_replaced(
        lambda: _load(
            accelerator,
            input_dir,
            load_kwargs or {},
            checksums=checksums,
            map_location=map_location,
            strict=strict,
        )
    )
    if project.automatic_checkpoint_naming:
        with together(world, "counting the checkpoints"):
            following = next_number(layout.automatic_folder(project), project.iteration)
        project.iteration = max(world.comm.all_gather_object(following))


def _told(
    load_kwargs: Mapping[str, Any] | None, checksums: bool, map_location: Any, strict: bool
) -> dict[str, Any]:
    """The arguments of a load, for the ranks to compare: devices by their kind, since each has its own, and functions by their class."""
    plain = (bool, int, str, type(None))
    loading = {
        name: value if isinstance(value, plain) else type(value).__name__
        for name, value in sorted((load_kwargs or {}).items())
    }
    place = torch.device(map_location).type
    return {
        "checksums": bool(checksums),
        "map_location": place,
        "strict": bool(strict),
        "load_kwargs": loading,
    }


def _load(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: Mapping[str, Any],
    *,
    checksums: bool,
    map_location: Any,
    strict: bool,
) -> None:
    """Choose a checkpoint, read everything that is small, check the rest, and only then hand out."""
    world = run.world
    with together(world, "looking for the checkpoint"):
        choices = candidates(run.project_configuration, input_dir)
        contents = collect(run)

    def check(info: CheckpointInfo) -> None:
        if info.manifest is not None:
            check_same_objects(contents, info.manifest.objects, info.path)

    taken = first_unchanged(world, choices, check, checksums=checksums)
    folder = taken.path
    with together(world, f"checking {folder}"), unless_replaced(taken):
        if taken.manifest is not None:
            contents = matched(contents, taken.manifest.objects, folder)
        check_files(contents, folder)
        loads = open_optimizers(run, contents, folder, map_location)
        pending = read_pending(run, contents, folder, taken.manifest, load_kwargs)
    pending = compared(world, pending, taken)
    models = list(run._models)
    with together(world, f"checking the weights in {folder}"), unless_replaced(taken):
        for hook in list(run._load_model_state_pre_hook.values()):
            hook(models, str(folder))  # may load models itself, and take them out of the list
        weights = contents.named_weights(models)
        loads = [*open_weights(run, weights, folder, map_location, strict), *loads]
    names = [*(name for _, name in weights), *(item.name for item in contents.optimizers)]
    with together(world, f"loading {folder}"), unless_replaced(taken):
        for name, load in zip(names, loads, strict=True):
            with giving(name, folder):
                load()
        hand_out(run, contents, pending)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give `obj` what `save_custom_state` wrote. CheckpointError for a file with more in it than plain data and tensors: name the classes that
    you trust with `torch.serialization.safe_globals`."""
    obj.load_state_dict(read_file(Path(path, layout.custom_file(index)), {}))


def map_location_of(world: World, asked: Any) -> Any:
    """Where states are loaded to. TypeError for anything but None, "cpu" and "on_device"."""
    if asked not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location must be None, 'cpu' or 'on_device', got {asked!r}")
    return world.device if asked == "on_device" else "cpu"
