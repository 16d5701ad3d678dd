"""The manifest of a checkpoint: written last, it says what belongs to the folder; without it nothing is whole."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from .layout import MANIFEST, CheckpointError, number_of, parked_of

FORMAT = 1
_SLICE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint consists of.

    `files` maps a relative path to its `bytes` and `crc32`; `objects` maps a kind (models, optimizers, ...) to the names
    and classes of what was saved, in order; `iteration` is the number of an automatic name; `saved_at` is in seconds.
    """

    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    step: int = 0
    epoch: int | None = None
    iteration: int | None = None
    saved_at: float = 0.0
    objects: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)
    files: Mapping[str, dict[str, int]] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """The folder's manifest, None when there is none (accelerate writes none).

    CheckpointError for one that cannot be understood or was written in a later format.
    """
    path = Path(folder, MANIFEST)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} is not whole: {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(content, dict) or not _is_count(content.get("format"), least=1):
        raise CheckpointError(
            f"the checkpoint {folder} is not whole: {MANIFEST} is not the manifest of a checkpoint"
        )
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content['format']}, this version reads up to {FORMAT}: upgrade acc-trainer"
        )
    known = {name: content[name] for name in Manifest.__dataclass_fields__ if name in content}
    for name, value in known.items():
        if not _FIELDS[name](value):
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: {MANIFEST} has been changed: {name} is {value!r:.60}"
            )
    return _with_safe_paths(Manifest(**known), folder)


def is_foreign(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a manifest.json that no checkpoint wrote, a web application's for instance."""
    path = Path(folder, MANIFEST)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # the half of one of ours that a power loss left begins as ours do
        return not Manifest().to_text().startswith(text[:13])
    return not (isinstance(content, dict) and {"format", "world_size", "files"} <= content.keys())


def files_of(folder: Path) -> dict[str, dict[str, int]]:
    """Sizes and checksums of all files below `folder`, by relative path, the manifest left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            found[name] = {"bytes": path.stat().st_size, "crc32": checksum(path)}
    return found


def checksum(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_SLICE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def check_whole(folder: str | os.PathLike[str], *, checksums: bool = False) -> Manifest:
    """The manifest of a folder that is whole: every file is there with its size, and with its checksum if asked for.

    CheckpointError names the folder, the file and what is wrong.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"the checkpoint {folder} is not whole: it has no {MANIFEST}")
    for name, said in manifest.files.items():
        size = _size_of(Path(folder, name))
        if size is None:
            raise CheckpointError(f"the checkpoint {folder} is not whole: {name} is missing")
        if size != said["bytes"]:
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: {name} has {size} bytes, {said['bytes']} were written"
            )
    if checksums:
        check_bytes(folder, manifest)
    return manifest


def check_bytes(folder: str | os.PathLike[str], manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """CheckpointError when the bytes of a file are not those that were written.

    Several processes of one machine share the work: each is one of `parts` and reads its own, so that every file is read once.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    for name in by_size[part::parts]:
        if checksum(Path(folder, name)) != manifest.files[name]["crc32"]:
            raise CheckpointError(f"the checkpoint {folder} is not whole: the bytes of {name} have changed")


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is a checkpoint of ours with every file in its size."""
    try:
        check_whole(folder)
    except CheckpointError:
        return False
    return True


def newest_whole(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint directly inside `folder`: the highest automatic number, else the one saved last.

    Folders that are not whole, and everything else that lies there, do not count.
    """
    best: tuple[tuple[int, float], Path] | None = None
    for path in _folders(Path(folder)):
        try:
            manifest = check_whole(path)
        except CheckpointError:
            continue
        number = number_of(_public_name(path))
        key = (-1 if number is None else number, manifest.saved_at)
        if best is None or key > best[0]:
            best = (key, path)
    return best[1] if best else None


def _folders(folder: Path) -> list[Path]:
    """The folders to look at: those with a public name, and what waits under another one while its own is missing."""
    try:
        found = [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    return [path for path in found if not path.name.startswith(".") or _is_parked(path)]


def _is_parked(path: Path) -> bool:
    public = path.with_name(_public_name(path))
    return public.name != path.name and parked_of(public) == path and not public.exists()


def _public_name(path: Path) -> str:
    return path.name.removeprefix(".").removesuffix(".old") if path.name.endswith(".old") else path.name


def _with_safe_paths(manifest: Manifest, folder: str | os.PathLike[str]) -> Manifest:
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise CheckpointError(f"the manifest of {folder} names a file outside of the folder: {name}")
    return manifest


def _size_of(path: Path) -> int | None:
    """The size of a plain file; None for anything else."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
    "saved_at": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "objects": _is_objects,
    "files": _is_files,
}
