"""The manifest of a checkpoint: written last, it says what belongs to the folder; without it nothing is whole."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
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
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} is not whole: {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise CheckpointError(
            f"the checkpoint {folder} is not whole: {MANIFEST} is not the manifest of a checkpoint"
        )
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content['format']}, this version reads up to {FORMAT}: upgrade acc-trainer"
        )
    known = {name: content[name] for name in Manifest.__dataclass_fields__ if name in content}
    return _with_safe_paths(Manifest(**known), folder)


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
        path = Path(folder, name)
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} is not whole: {name} is missing")
        size = path.stat().st_size
        if size != said["bytes"]:
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: {name} has {size} bytes, {said['bytes']} were written"
            )
        if checksums and checksum(path) != said["crc32"]:
            raise CheckpointError(f"the checkpoint {folder} is not whole: the bytes of {name} have changed")
    return manifest


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


def describe_objects(kinds: Mapping[str, list[tuple[str, Any]]]) -> dict[str, list[dict[str, str]]]:
    """The `objects` of a manifest from (name, class name) pairs by kind."""
    return {
        kind: [{"name": name, "class": kind_of} for name, kind_of in items] for kind, items in kinds.items()
    }
