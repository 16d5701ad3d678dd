"""How much memory the control groups of this process, such as a container, still allow (Linux; imports no torch).

The formats are those of the kernel's documentation, admin-guide/cgroup-v2 and admin-guide/cgroup-v1/memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    """How one version of the interface names things."""

    folder: str  # where its hierarchy is mounted
    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[
        str, ...
    ]  # lines of memory.stat: file pages and caches that the kernel gives up when asked


_V2 = _Version(
    folder="sys/fs/cgroup",
    limits=("memory.max", "memory.high"),
    used="memory.current",
    reclaimable=("active_file", "inactive_file", "slab_reclaimable"),
)
_V1 = _Version(
    folder="sys/fs/cgroup/memory",
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    reclaimable=("total_active_file", "total_inactive_file"),
)


def group_free_bytes(root: str | Path = "/") -> int | None:
    """The bytes that this process's group and the groups around it allow beside what they use; None without a limit.

    The least of all levels counts. File pages that the kernel can drop are free. `root` is the folder with `proc` and `sys`.
    """
    return min(_free_on_each_level(Path(root)), default=None)


def _free_on_each_level(root: Path) -> Iterator[int]:
    for version, path in _memberships(root):
        level = top = root / version.folder
        yield from _free_on_level(top, version)  # a container may see its own group as the top
        for part in Path(path).parts[1:]:
            level = level / part
            yield from _free_on_level(level, version)


def _memberships(root: Path) -> Iterator[tuple[_Version, str]]:
    """The lines `hierarchy:controllers:path` of /proc/self/cgroup that are about memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _free_on_level(level: Path, version: _Version) -> Iterator[int]:
    used = _number(level / version.used)
    if used is None:
        return
    stat = _numbers(level / "memory.stat")
    held = max(used - sum(stat.get(name, 0) for name in version.reclaimable), 0)
    limits = [_number(level / name) for name in version.limits]
    limits.append(stat.get("hierarchical_memory_limit"))  # of groups around, which a container may not see
    for limit in limits:
        if limit is not None:
            yield max(limit - held, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The lines `name number` of a file; nothing when it is not there."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(file: Path) -> int | None:
    """The number in a file; None when it is not there or says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
