"""The transaction: stage beside the target, sync, manifest last, one rename, sync the parent.

[Note: what a kill leaves]
Before the rename: the old checkpoint, and `.NAME.writing`, which the next save clears and no reader looks at. After it:
the new checkpoint, and the old one under `.NAME.writing`. Where two folders cannot be exchanged in one call, the old one
waits under `.NAME.old` for the time of one rename; readers look there when NAME is missing, and the next save puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

from acc_ops.callers import warn_caller
from acc_plugins.states.whole import is_foreign

from .layout import MANIFEST, OURS, CheckpointError, number_of, parked_of, removing_of, staging_of
from .manifest import Manifest, added_to, read_manifest

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def check_target(target: Path) -> None:
    """CheckpointError when `target` could not be replaced as a whole."""
    if target.is_symlink():  # links were followed by whoever calls
        raise CheckpointError(f"{target} is a link that leads to itself: delete it, or save somewhere else")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a folder")
    if target.is_dir() and (Path.cwd().is_relative_to(target) or os.path.ismount(target)):
        what = "a mount point" if os.path.ismount(target) else "the current folder, or holds it,"
        raise CheckpointError(
            f"{target} is {what} and cannot be replaced as a whole: save into a folder inside it"
        )
    if is_foreign(target):
        raise CheckpointError(
            f"{target / MANIFEST} was not written by save_state, which would replace it: "
            "save into another folder, or move the file away"
        )


def begin(target: Path) -> Path:
    """An empty staging folder for `target`; what killed saves left behind is cleared."""
    make_lasting(target.parent)
    put_back(target)
    clear_leftovers(target)
    staging = staging_of(target)
    staging.mkdir()
    if target.is_dir():
        shutil.copymode(target, staging)
    return staging


def make_lasting(folder: Path) -> None:
    """`folder` and those above it that are missing; a power loss does not take them away again."""
    if folder.is_dir():
        return
    make_lasting(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def put_back(target: Path) -> None:
    """After a kill between two renames: the old checkpoint gets its name back."""
    parked = parked_of(target)
    if parked.is_dir() and not target.exists():
        os.rename(parked, target)


def clear_leftovers(target: Path) -> None:
    """Delete half-written folders of `target`, and for an automatic name those of all its siblings."""
    for path in target.parent.iterdir():
        name = path.name
        owner = name.removeprefix(".").rpartition(".")[0]
        ours = owner == target.name or (number_of(target.name) is not None and number_of(owner) is not None)
        if not ours or not name.startswith("."):
            continue
        public = path.with_name(owner)
        if path in (staging_of(public), removing_of(public)) or (
            path == parked_of(public) and public.exists()
        ):
            _delete(path)


def finish(staging: Path, target: Path, manifest: Manifest) -> None:
    """Sync everything in `staging`, write its manifest, and make it the content of `target` in one step."""
    _sync_files(staging)
    _write_synced(staging / MANIFEST, manifest.to_text())
    for name in _files_in_the_way(target):
        warn_caller(
            f"{target / name} was not written by save_state and would be taken for a part of the checkpoint: it is not kept"
        )
    _keep_foreign(target, staging)
    _sync_folders(staging)
    if not target.exists():
        os.rename(staging, target)
        try:
            sync_folder(target.parent)
        except OSError:  # a save that failed leaves no folder that takes the number of the next
            os.rename(target, staging)
            raise
        return
    if _exchange(staging, target):
        try:
            _check_was_folder(staging, target)
        except CheckpointError:
            _exchange(staging, target)
            raise
    else:
        parked = parked_of(target)
        os.rename(target, parked)
        try:
            _check_was_folder(parked, target)
            os.rename(staging, target)
        except (OSError, CheckpointError):
            os.rename(parked, target)
            raise
        os.rename(parked, staging)
    sync_folder(target.parent)
    if _keep_foreign(staging, target, move=True):  # what came in between, and what cannot have two names
        _sync_folders(target)
    shutil.rmtree(staging)


def _check_was_folder(old: Path, target: Path) -> None:
    """CheckpointError when what had the name of `target`, and is `old` now, is somebody else's."""
    if old.is_symlink() or not old.is_dir():
        raise CheckpointError(
            f"{target} became a file while the checkpoint was written: it stays as it is, and nothing was saved. Move it away, or save "
            "somewhere else"
        )


def remove(target: Path) -> None:
    """Delete a checkpoint so that a kill never leaves a part of it under its name. Of a link, only the link."""
    if target.is_symlink():
        target.unlink()
        sync_folder(target.parent)
        return
    going = removing_of(target)
    if going.is_symlink() or going.exists():
        _delete(going)
    os.rename(target, going)
    sync_folder(target.parent)
    shutil.rmtree(going)


def _delete(path: Path) -> None:
    """A folder with all that is in it; of a link, only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync_files(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync_file(path)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folders(folder: Path) -> None:
    """The names in `folder` and in all folders below it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            sync_folder(path)
    sync_folder(folder)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss; nothing on Windows, which cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keep_foreign(source: Path, destination: Path, *, move: bool = False) -> bool:
    """What in the old folder no checkpoint wrote (logs, notes, pipes) is the user's: it is in the new folder too. Whether there was any.

    Links, not copies: a program that still appends to a file goes on writing into the same one. Folders keep their modes. What is called like a
    file of a checkpoint is never kept: whoever loads the new one would read it.
    """
    if not source.is_dir():
        return False
    old = _old_manifest(source)
    ours = {MANIFEST, *(old.files if old else ())}
    any_kept = False
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        kept = destination / name
        if name in ours or os.path.lexists(kept) or OURS.fullmatch(name):
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                _make_folders(kept, path)
            continue
        any_kept = True
        _make_folders(kept.parent, path.parent)
        if move:
            os.rename(path, kept)
        else:
            _link_or_copy(path, kept)
    return any_kept


def _files_in_the_way(folder: Path) -> list[str]:
    """Files that somebody put into a checkpoint of ours, under names that a checkpoint could have."""
    old = _old_manifest(folder)
    return [] if old is None else added_to(folder, old)


def _make_folders(folder: Path, like: Path) -> None:
    """`folder` and those above it that are missing, each with the mode of its counterpart."""
    if folder.is_dir():
        return
    _make_folders(folder.parent, like.parent)
    folder.mkdir()
    shutil.copymode(like, folder)


def _link_or_copy(path: Path, kept: Path) -> None:
    try:
        os.link(path, kept, follow_symlinks=False)
    except (OSError, NotImplementedError):  # this file system has no links, or not for this kind of file
        if path.is_symlink() or path.is_file():
            shutil.copy2(path, kept, follow_symlinks=False)
            if not kept.is_symlink():
                _sync_file(kept)
        # a pipe or a socket is moved when the new folder has its name


def _old_manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:  # an unreadable one lists nothing
        return None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    paths = (os.fsencode(one), os.fsencode(other))
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(*paths, 2)  # type: ignore[union-attr]
    elif hasattr(library, "renameat2"):
        failed = library.renameat2(-100, paths[0], -100, paths[1], 2)  # type: ignore[union-attr]
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
