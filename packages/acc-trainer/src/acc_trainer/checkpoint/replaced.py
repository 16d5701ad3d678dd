"""A load while another process saves: the folder that was chosen may be replaced, or pruned, in the middle of it. That is noticed, never mixed.

[Note: what is noticed when] A save replaces a folder in one step, the manifest with it. So whoever reads files and then finds the manifest that was
chosen has read files of one save; an error after which the manifest is another one is no damage. A load looks after everything was read and before
anything of the run is touched, and once more when all was loaded. Each time it begins again, and what it loads is loaded over all of the first try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .layout import CheckpointError, ReplacedError
from .listing import CheckpointInfo
from .manifest import read_manifest

ROUNDS = 5
T = TypeVar("T")


def is_replaced(info: CheckpointInfo) -> bool:
    """Whether the folder has another manifest by now. Of one without a manifest nothing can be said, of a disk that does not answer neither."""
    if info.manifest is None:
        return False
    try:
        return read_manifest(info.path) != info.manifest
    except CheckpointError:
        return False


@contextmanager
def unless_replaced(info: CheckpointInfo) -> Iterator[None]:
    """ReplacedError at the end of the block, and instead of any error in it, when the folder is no longer that of `info`."""
    try:
        yield
    except Exception as error:
        if is_replaced(info):
            raise _replaced(info) from error
        raise
    if is_replaced(info):
        raise _replaced(info)


def again_while_replaced(load: Callable[[], T]) -> T:
    """What `load` returns, called again, a few times, while it ends because a folder was replaced, on this rank or on another.

    All ranks call it alike, since `together` raises it on all of them.
    """
    for _ in range(ROUNDS - 1):
        try:
            return load()
        except ReplacedError:
            continue
    return load()


def _replaced(info: CheckpointInfo) -> ReplacedError:
    return ReplacedError(
        f"{info.path} was replaced or deleted by another save while it was loaded, again and again: this run may hold parts of several "
        "saves. Load again before you use it, from a folder that nobody saves into"
    )
