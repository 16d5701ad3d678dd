"""The manifest of a checkpoint: written last, it says what belongs to the folder; without it nothing is whole."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISLNK, S_ISREG
from typing import Any

from acc_bigmodel.stores.strict_json import parse_json
from acc_ops.callers import warn_caller

from .layout import MANIFEST, OURS, CheckpointError, NotWholeError

FORMAT = 1
_SLICE_BYTES = 1 << 20
_LARGEST_BYTES = 64 << 20  # of a manifest: that of a million files
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint consists of.

    `files` maps a relative path to its `bytes` and `crc32`; `objects` maps a kind (models, optimizers, ...) to the names
    and classes of what was saved, in order; `iteration` is the number of an automatic name; `saved_at` is in seconds; `metric`
    is what `save_state` was told of the run's quality.
    """

    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    step: int = 0
    epoch: int | None = None
    iteration: int | None = None
    saved_at: float = 0.0
    metric: float | None = None
    objects: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)
    files: Mapping[str, dict[str, int]] = field(default_factory=dict)

    def to_text(self) -> str:
        """The file's content. CheckpointError for what a reader would refuse."""
        return json.dumps(asdict(self.checked("the new checkpoint")), indent=1) + "\n"

    def checked(self, folder: str | os.PathLike[str]) -> Manifest:
        """The same. NotWholeError, telling of `folder`, when a value or a file name is none that a save writes."""
        for name, is_right in _FIELDS.items():
            if not is_right(value := getattr(self, name)):
                raise NotWholeError(
                    f"the checkpoint {folder} is not whole: {MANIFEST} has been changed: {name} is {value!r:.60}"
                )
        return _with_safe_paths(self, folder)


def metric_of(given: Any) -> float | None:
    """`given` (a number, a tensor of one element) as a manifest keeps it; NaN and the infinities are None, with a warning.

    TypeError for anything that is no number.
    """
    if given is None:
        return None
    try:
        metric = float(given)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # RuntimeError: a tensor of several elements
        shown = f"{given!r:.80}" if not isinstance(given, int) else "larger than any float"
        raise TypeError(
            f"save_state: metric must be one number, got {type(given).__name__}: {shown}"
        ) from error
    if math.isfinite(metric):
        return metric
    warn_caller(f"save_state: the metric is {metric}, so this checkpoint is not among the best")
    return None


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """The folder's manifest, None when there is none (accelerate writes none).

    NotWholeError for one that cannot be understood, CheckpointError for one of a later format and where the disk does not answer.
    """
    text = _text_of(Path(folder, MANIFEST))
    if text is None:
        return None
    try:
        content = parse_json(text)
    except ValueError as error:
        raise NotWholeError(
            f"the checkpoint {folder} is not whole: {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(content, dict) or not _is_count(content.get("format"), least=1):
        raise NotWholeError(
            f"the checkpoint {folder} is not whole: {MANIFEST} is not the manifest of a checkpoint"
        )
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content['format']}, this version reads up to {FORMAT}: upgrade acc-trainer"
        )
    return Manifest(**{name: content[name] for name in _FIELDS if name in content}).checked(folder)


def _text_of(path: Path) -> bytes | None:
    """The bytes of a manifest; None when there is none."""
    folder = path.parent
    if _size_of(folder, MANIFEST) is None:
        if not os.path.lexists(path):
            return None
        raise NotWholeError(f"the checkpoint {folder} is not whole: {MANIFEST} is no plain file")
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:  # deleted since, with its folder
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(text) > _LARGEST_BYTES:
        raise NotWholeError(
            f"the checkpoint {folder} is not whole: {MANIFEST} is larger than any manifest ({_LARGEST_BYTES >> 20} MiB)"
        )
    return text


def files_of(folder: Path, known: Mapping[str, dict[str, int]] | None = None) -> dict[str, dict[str, int]]:
    """Sizes and checksums of all files below `folder`, by relative path, the manifest left out.

    Only those are read that are not `known` already, or have another size than is known.
    """
    known = known or {}
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            said = known.get(name)
            fits = said is not None and said["bytes"] == path.stat().st_size
            found[name] = said if said is not None and fits else _described(path)
    return found


def described(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Sizes and checksums of these files in `folder`."""
    return {name: _described(folder / name) for name in names}


def _described(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_SLICE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def check_whole(folder: str | os.PathLike[str], *, checksums: bool = False) -> Manifest:
    """The manifest of a folder that is whole: every file is there with its size, and with its checksum if asked for, and no other that a load
    might take for one of them.

    NotWholeError names the folder, the file and what is wrong; CheckpointError for a file that was added, and for a disk that does not answer.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise NotWholeError(f"the checkpoint {folder} is not whole: it has no {MANIFEST}")
    for name, said in manifest.files.items():
        size = _size_of(Path(folder), name)
        if size is None:
            raise NotWholeError(f"the checkpoint {folder} is not whole: {name} is missing")
        if size != said["bytes"]:
            raise NotWholeError(
                f"the checkpoint {folder} is not whole: {name} has {size} bytes, {said['bytes']} were written"
            )
    if added := added_to(folder, manifest):
        raise CheckpointError(
            f"{folder} holds {added[0]}, which is not of this checkpoint ({MANIFEST} does not list it): "
            "another program has written into the folder; move the file away"
        )
    if checksums:
        check_bytes(folder, manifest)
    return manifest


def added_to(folder: str | os.PathLike[str], manifest: Manifest) -> list[str]:
    """The files that look like a checkpoint's and are not of this one. NotWholeError for a folder that is being deleted."""
    home = Path(folder)
    names = []
    try:
        for inside, folders, files in os.walk(
            home, onerror=_raise
        ):  # rglob takes a folder that is gone for an empty one
            names += [Path(inside, name).relative_to(home).as_posix() for name in (*folders, *files)]
    except FileNotFoundError as error:
        raise NotWholeError(f"the checkpoint {folder} is not whole: it is being deleted") from error
    except OSError as error:
        raise _unreadable(home, error) from error
    names.sort()
    return [name for name in names if OURS.fullmatch(name) and name not in manifest.files]


def check_bytes(folder: str | os.PathLike[str], manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """NotWholeError when the bytes of a file are not those that were written.

    Several processes of one machine share the work: each is one of `parts` and reads its own, so that every file is read once.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    for name in by_size[part::parts]:
        path = Path(folder, name)
        try:
            found = checksum(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if found != manifest.files[name]["crc32"]:
            raise NotWholeError(f"the checkpoint {folder} is not whole: the bytes of {name} have changed")


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is a checkpoint of ours with every file in its size."""
    try:
        check_whole(folder)
    except CheckpointError:
        return False
    return True


def _with_safe_paths(manifest: Manifest, folder: str | os.PathLike[str]) -> Manifest:
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or _DRIVE.match(name):
            raise NotWholeError(f"the manifest of {folder} names a file outside of the folder: {name}")
        if "\0" in name or path.as_posix() != name or name in (".", MANIFEST):
            raise NotWholeError(
                f"the checkpoint {folder} is not whole: {MANIFEST} has been changed: it names a file {name!r:.60}"
            )
    return manifest


_DRIVE = re.compile("[A-Za-z]:")


def _size_of(folder: Path, name: str) -> int | None:
    """The size of a plain file inside `folder`; None for anything else.

    NotWholeError for a link that leads out of the folder; CheckpointError for a disk that does not answer.
    """
    path = folder / name
    try:
        found = os.lstat(path)
        if S_ISLNK(found.st_mode) or "/" in name:
            home = os.path.realpath(folder)
            if os.path.commonpath([home, os.path.realpath(path)]) != home:
                raise NotWholeError(
                    f"the checkpoint {folder} is not whole: {name} leads out of the folder, to {os.path.realpath(path)}; "
                    "copy the file in"
                )
            found = os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _unreadable(path, error) from error
    except ValueError:  # a name that no file can have
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def _raise(error: OSError) -> None:
    raise error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error.strerror or error}; nothing was loaded, and the checkpoint may be whole: try again "
        "when the disk answers and its permissions are right"
    )


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_files(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(said, dict) and _is_count(said.get("bytes")) and _is_count(said.get("crc32"))
        for said in value.values()
    )


def _is_objects(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entries, list)
        and all(isinstance(entry, dict) and isinstance(entry.get("class"), str) for entry in entries)
        for entries in value.values()
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "versions": lambda value: isinstance(value, dict),
    "world_size": lambda value: _is_count(value, least=1),
    "step": _is_count,
    "epoch": lambda value: value is None or _is_count(value),
    "iteration": lambda value: value is None or _is_count(value),
    "saved_at": lambda value: _is_number(value),
    "metric": lambda value: value is None or _is_number(value),
    "objects": _is_objects,
    "files": _is_files,
}
