"""Which checkpoint a load takes: a whole one, the same on every rank, and all of it looked at before anything of the run is touched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from acc_ops.callers import warn_caller
from acc_ops.world import World

from . import layout
from .layout import CheckpointError, NotWholeError, Project, ReplacedError
from .listing import CheckpointInfo, look
from .manifest import Manifest, check_bytes, check_whole, read_manifest
from .replaced import ROUNDS, is_replaced, unless_replaced
from .together import together


def candidates(project: Project, input_dir: str | os.PathLike[str] | None) -> list[CheckpointInfo]:
    """What may be loaded, the first choice first: the folder that was named, or the whole numbered ones from the newest on.

    A checkpoint without a manifest is taken, with a warning, when it was named or nothing else is there. A warning names newer
    folders that are not whole. ValueError when there is no folder; CheckpointError for a named one that is not whole.
    """
    if input_dir == "":
        raise ValueError("load_state: input_dir is empty; name the folder to load")
    if input_dir is not None:
        named = _named(Path(input_dir))
        if project.automatic_checkpoint_naming:
            _say_newer(named, look(layout.automatic_folder(project)).newest)
        return [named]
    if not project.automatic_checkpoint_naming:
        raise ValueError(
            "load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    return _numbered(layout.automatic_folder(project))


def first_unchanged(
    world: World,
    choices: Sequence[CheckpointInfo],
    check: Callable[[CheckpointInfo], None],
    *,
    checksums: bool,
) -> CheckpointInfo:
    """The first of `choices` that all ranks have, that `check` raises nothing for, and whose bytes are those that were written.

    With `checksums` every file is read once per machine. A later choice is taken, with a warning, when bytes have changed, and for no
    other reason. CheckpointError on all ranks when they disagree, when `check` fails on one, and when the last choice has changed.
    """
    for place, info in enumerate(choices):
        _agree_on(world, info)
        with together(world, f"checking {info.path}"), unless_replaced(info):
            check(info)
        found = _changed_bytes(world, info) if checksums else None
        # every rank knows of every other what it found and whether it has another choice
        said = world.comm.all_gather_object((found, place + 1 < len(choices)))
        changed = next((text for text, _ in said if text is not None), None)
        if changed is None:
            return info
        if not all(more for _, more in said):
            raise NotWholeError(changed)
        warn_caller(
            f"{changed}, so the checkpoint before it is loaded: {choices[place + 1].path} of step {choices[place + 1].step}. "
            f"What was trained after that is lost; look after the disk, and move {info.path.name} away"
        )
    raise AssertionError("candidates() gives at least one")


def _named(folder: Path) -> CheckpointInfo:
    parked = layout.parked_of(Path(os.path.realpath(folder)))
    if not folder.is_dir() and parked.is_dir():  # a save was killed between two renames
        folder = parked
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}")
    for _ in range(ROUNDS):
        manifest = read_manifest(folder)
        if manifest is None:
            return _without_manifest(folder)
        try:
            return CheckpointInfo(path=folder, manifest=check_whole(folder), problem=None)
        except CheckpointError:
            if read_manifest(folder) == manifest:  # else it was replaced meanwhile
                raise
    return CheckpointInfo(path=folder, manifest=check_whole(folder), problem=None)


def _say_newer(named: CheckpointInfo, newest: CheckpointInfo | None) -> None:
    """Who goes back to an older checkpoint hears what a later load without a name would take."""
    if newest is None or newest.step is None or named.step is None or newest.step <= named.step:
        return
    warn_caller(
        f"{newest.path.name} has step {newest.step} and is newer than {named.path} of step {named.step}: load_state() without a "
        "folder takes it until this run has gone further. Move it away, and others of the part of the run that you give up"
    )


def _numbered(home: Path) -> list[CheckpointInfo]:
    for _ in range(ROUNDS):
        found = [info for info in look(home) if info.number is not None]
        whole = [info for info in reversed(found) if info.whole]
        if whole or all(
            os.path.lexists(info.path) for info in found
        ):  # else another run saves and prunes here
            break
    others = [info for info in found if not info.whole and not info.path.name.startswith(".")]
    foreign = [info for info in others if not os.path.lexists(info.path / layout.MANIFEST)]
    if whole:
        _say_passed_over(others, than=whole[0])
        return whole
    if foreign:
        taken = max(foreign, key=_number)
        _say_passed_over([info for info in others if info is not taken], than=taken)
        return [_without_manifest(taken.path)]
    for info in others:
        if not isinstance(info.problem, NotWholeError):
            raise CheckpointError(str(info.problem)) from info.problem
    reasons = "".join(f"; {info.problem}" for info in others)
    raise ValueError(f"there is no whole checkpoint in {home}{reasons}")


def _say_passed_over(others: Sequence[CheckpointInfo], than: CheckpointInfo) -> None:
    """Newer folders that are not whole are named; one that cannot be judged now (a disk that does not answer) is an error."""
    for info in others:
        if _number(info) < _number(than):
            continue
        if not isinstance(info.problem, NotWholeError):
            raise CheckpointError(str(info.problem)) from info.problem
        warn_caller(
            f"{info.path.name} has a higher number than {than.path.name}, which is loaded, but {info.problem}"
        )


def _number(info: CheckpointInfo) -> int:
    return -1 if info.number is None else info.number


def _without_manifest(folder: Path) -> CheckpointInfo:
    warn_caller(
        f"{folder} has no {layout.MANIFEST}: it was not written by save_state of this library, "
        "so nothing can be said about it being whole"
    )
    return CheckpointInfo(path=folder, manifest=None, problem=None)


def _agree_on(world: World, info: CheckpointInfo) -> None:
    """CheckpointError on all ranks unless they have the same checkpoint. Machines with disks of their own have files of their own."""
    shared, whole = "", ""
    if info.manifest is not None:
        shared = _digest(replace(info.manifest, files={}, saved_at=0.0))
        whole = _digest(info.manifest)
    said = world.comm.all_gather_object((world.node_rank, (info.path.name, info.step), shared, whole))
    if len({entry[1:] for entry in said}) > 1:  # another run may be saving here at this moment
        replaced = world.comm.all_gather_object(is_replaced(info))
        if any(replaced):
            raise ReplacedError(f"{info.path} was replaced by another save while it was chosen")
    first_on = {node: rank for rank, (node, *_) in reversed(list(enumerate(said)))}
    for rank, (node, at, its_shared, its_whole) in enumerate(said):
        twin = first_on[node]
        if at != said[0][1]:
            (name, step), (other_name, other_step) = at, said[0][1]
            what = f"rank 0 has {other_name} of step {other_step}, rank {rank} has {name} of step {step}"
        elif its_shared != said[0][2] or its_whole != said[twin][3]:
            other = 0 if its_shared != said[0][2] else twin
            what = f"the {layout.MANIFEST} of {at[0]} is another on rank {rank} (machine {node}) than on rank {other}"
        else:
            continue
        raise CheckpointError(
            f"the ranks disagree on the checkpoint to load: {what}; all must see the same files"
        )


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_text().encode()).hexdigest()


def _changed_bytes(world: World, info: CheckpointInfo) -> str | None:
    """What this rank found changed among the files that it reads for its machine."""
    if info.manifest is None:
        return None
    with together(world, f"reading {info.path}"), unless_replaced(info):
        try:
            check_bytes(info.path, info.manifest, world.local_rank, world.local_size)
        except NotWholeError as error:
            if not is_replaced(info):  # else the files are of another save
                return str(error)
    return None
