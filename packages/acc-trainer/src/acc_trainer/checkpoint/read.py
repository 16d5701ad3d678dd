"""Loading: the whole checkpoint is checked on every rank before anything of the run is touched."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import layout
from .contents import Run, check_same_objects, collect
from .manifest import Manifest, check_bytes, check_whole, newest_whole, read_manifest
from .meeting import meet
from .pending import check_files, check_weights, hand_out, read_pending
from .rotate import next_number, numbers_in
from .together import agree, together
from .torch_files import read_file


def load_state(
    accelerator: Run,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Load what `save_state` wrote: from `input_dir`, or from the newest whole automatically named folder.

    Before anything is touched, every rank checks that the run has the same objects and that each file is there and can be read;
    its bytes are compared with their checksums, each file once per machine (`checksums=False` leaves that out).
    `load_kwargs` go to torch.load; `map_location` (None, "cpu", "on_device") and `strict` are taken from `kwargs`. A
    checkpoint without a manifest, as accelerate writes it, is loaded with a warning. Registered objects are unpickled:
    load only what you trust. Rank 0 waits `wait_s` seconds (60 unless given) for the others to call it too.

    CheckpointError for a folder that is not whole, for other objects than those saved, and when ranks disagree or do not come;
    ValueError when there is no folder; TypeError for other arguments. A failure on one rank raises on all.
    """
    world, project = accelerator.world, accelerator.project_configuration
    meet(world, "load_state", kwargs.pop("wait_s", None))
    with together(world, "looking for the checkpoint"):
        map_location = _map_location(accelerator, kwargs.pop("map_location", None))
        strict, checksums = kwargs.pop("strict", True), kwargs.pop("checksums", True)
        if kwargs:
            known = "checksums, map_location, strict, wait_s"
            raise TypeError(f"load_state does not know {', '.join(kwargs)}; known: {known}")
        if not isinstance(load_kwargs, (Mapping, type(None))):
            raise TypeError(f"load_kwargs must be a dict of arguments for torch.load, got {load_kwargs!r}")
        folder = _folder(project, input_dir)
        manifest = _checked(folder)
    agree(world, (folder.name, manifest.step if manifest else None), "the checkpoint to load (folder, step)")
    models = list(accelerator._models)
    with together(world, f"checking {folder}"):
        contents = collect(accelerator)
        if manifest is not None:
            check_same_objects(contents, manifest.objects, folder)
            if checksums:
                check_bytes(folder, manifest, world.local_rank, world.local_size)
        check_files(contents, folder, accelerator)
        pending = read_pending(accelerator, contents, folder, manifest, load_kwargs or {})
    with together(world, f"checking the weights in {folder}"):
        for hook in list(accelerator._load_model_state_pre_hook.values()):
            hook(models, str(folder))  # may load models itself, and take them out of the list
        check_weights(models, folder)
    with together(world, f"loading {folder}"):
        for index, model in enumerate(models):
            accelerator.strategy.load_model(
                model, str(folder), layout.numbered("model", index), map_location=map_location, strict=strict
            )
        for item in contents.optimizers:
            accelerator.strategy.load_optimizer(item.thing, str(folder), item.name, map_location=map_location)
        hand_out(accelerator, contents, pending)
    if project.automatic_checkpoint_naming:
        project.iteration = next_number(layout.automatic_folder(project), project.iteration)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give `obj` what `save_custom_state` wrote. The file is unpickled: load only what you trust."""
    obj.load_state_dict(read_file(Path(path, layout.custom_file(index)), {"weights_only": False}))


def _map_location(run: Run, asked: Any) -> Any:
    if asked not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location must be None, 'cpu' or 'on_device', got {asked!r}")
    return run.world.device if asked == "on_device" else "cpu"


def _folder(project: layout.Project, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir == "":
        raise ValueError("load_state: input_dir is empty; name the folder to load")
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
