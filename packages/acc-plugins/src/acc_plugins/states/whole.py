"""Which folders are checkpoints of `save_state`: nothing else writes into one, or takes a part of it away."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_BEGINNING = '{\n "format": '  # of every manifest that a checkpoint wrote, also of the half of one that a power loss left
_KEYS = {"format", "world_size", "files"}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the folder, the file and what is wrong with it."""


class DoesNotFitError(CheckpointError, ValueError):
    """What was saved belongs to other weights or to another optimizer, and nothing was changed. Also the ValueError that torch has for the latter."""


def is_foreign(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a manifest.json that no checkpoint wrote, a web application's for instance."""
    try:
        return _files_of(Path(folder)) is None
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_no_checkpoint(folder: str | os.PathLike[str], doing: str) -> None:
    """CheckpointError when `folder` is a checkpoint of ours: `doing` (writing weights) would make another one of it than its manifest says."""
    if os.path.lexists(Path(folder, MANIFEST)) and not is_foreign(folder):
        raise CheckpointError(
            f"{os.fspath(folder)} is a checkpoint of save_state, {doing} would spoil it: name another folder, one inside it for instance"
        )


def check_no_part(path: str | os.PathLike[str], doing: str) -> None:
    """CheckpointError when a checkpoint of ours consists of `path`, or of what is in it: `doing` would leave it not whole."""
    inside = Path(path).resolve()
    for folder in inside.parents:
        try:
            files = _files_of(folder)
        except OSError:
            continue
        name = inside.relative_to(folder).as_posix()
        if files is not None and (not files or any(f"{one}/".startswith(f"{name}/") for one in files)):
            raise CheckpointError(
                f"{os.fspath(path)} is a part of the checkpoint {folder}, {doing} would spoil it: name another folder, or remove the whole "
                "checkpoint when it is not needed any more"
            )


def _files_of(folder: Path) -> list[str] | None:
    """The files that the folder's manifest names: none, where nobody can tell; None for the manifest of something else. FileNotFoundError and
    NotADirectoryError where there is no manifest."""
    try:
        text = Path(folder, MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError):
        return None
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        return [] if _BEGINNING.startswith(text[: len(_BEGINNING)]) else None
    if not (isinstance(content, dict) and content.keys() >= _KEYS):
        return None
    files = content["files"]
    return list(files) if isinstance(files, dict) else []
