"""What a power loss may leave of a traced run of file changes: only what was synced is sure, and the rest may be there or not.

[Note: what is sure] The bytes of a file as of its last fsync, and the entries of a folder as of the folder's last fsync. Beyond that
each file may hold any later state, a torn one included, and each folder may be at any later change of it, in their order: a rename
is there as a whole or not at all, as file systems with a journal promise; that folders keep no order among each other is more
than they inflict.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Union

from file_steps import Step

_EXCHANGE = 2


class File:
    """Bytes in several versions: 0 is what was there first, `now` what a reader sees, `synced` what is sure."""

    def __init__(self, first: bytes = b"") -> None:
        self.first = first
        self.last = b"deleted before the end"
        self.now = self.synced = 0

    def content(self, version: int) -> bytes:
        """The bytes of a version, asked when the run has ended; of those in between it is only known that they are not whole."""
        if version == 0:
            return self.first
        return self.last if version == self.now else self.last[: len(self.last) // 2]


class Folder:
    """Entries in several versions since the last sync, oldest first; the last is what a reader sees."""

    def __init__(self, entries: dict[str, File | Folder] | None = None) -> None:
        self.past = [entries or {}]

    @property
    def now(self) -> dict[str, File | Folder]:
        return self.past[-1]

    def put(self, **entries: File | Folder | None) -> None:
        """Names get new nodes, or None; together, as one change."""
        changed = {**self.now, **entries}
        self.past.append({name: node for name, node in changed.items() if node is not None})


Found = dict[str, Union["Found", tuple[File, int]]]  # what lies in a folder: folders, and files in a version


class Disk:
    """The folder `root`, as it was copied to `before`, in which the steps of a run are made again one by one."""

    def __init__(self, before: Path, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.top = _read(before)

    def make(self, step: Step) -> None:
        """Do one step; those that failed changed nothing."""
        if not step.error:
            getattr(self, f"_{step.kind}")(step)

    def found(self, draws: int, chance: random.Random) -> Iterator[Found]:
        """What may be found after a power loss now: the least, all names with synced bytes only, and `draws` others."""
        yield _found(self.top, lambda folder: folder.past[0], lambda file: file.synced)
        yield _found(self.top, lambda folder: folder.now, lambda file: file.synced)
        for _ in range(draws):
            yield _found(
                self.top,
                lambda folder: chance.choice(folder.past),
                lambda file: chance.randint(file.synced, file.now),
            )

    def end(self, folder: Path) -> None:
        """Take the bytes that the run has left in `folder`. AssertionError when other names lie there: the trace has missed steps."""
        _learn(self.top, folder)

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder = self.top
        *above, name = os.path.relpath(path, self.root).split(os.sep)
        for part in above:
            inner = folder.now[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def _node(self, path: str) -> File | Folder | None:
        if path == self.root:
            return self.top
        folder, name = self._parent(path)
        return folder.now.get(name)

    def _open(self, step: Step) -> None:
        folder, name = self._parent(step.path)
        file = folder.now.get(name)
        if file is None:
            folder.put(**{name: File()})
        elif isinstance(file, File) and step.flags & os.O_TRUNC:
            file.now += 1

    def _write(self, step: Step) -> None:
        file = self._node(step.path)
        if isinstance(file, File):  # else it was deleted while it was open
            file.now += 1

    def _sync(self, step: Step) -> None:
        node = self._node(step.path)
        if isinstance(node, File):
            node.synced = node.now
        elif isinstance(node, Folder):
            node.past = [node.now]

    def _mkdir(self, step: Step) -> None:
        folder, name = self._parent(step.path)
        folder.put(**{name: Folder()})

    def _unlink(self, step: Step) -> None:
        folder, name = self._parent(step.path)
        folder.put(**{name: None})

    def _link(self, step: Step) -> None:
        (source, name), (target, new) = self._parent(step.path), self._parent(step.other)
        target.put(**{new: source.now[name]})

    def _rename(self, step: Step) -> None:
        (source, name), (target, new) = self._parent(step.path), self._parent(step.other)
        moved = source.now[name]
        left = target.now[new] if step.flags & _EXCHANGE else None
        if source is target:
            source.put(**{name: left, new: moved})
        else:
            target.put(**{new: moved})
            source.put(**{name: left})

    _truncate, _rmdir = _write, _unlink


def lay_out(found: Found, folder: Path) -> None:
    """Make what was found real in an empty `folder`."""
    for name, node in found.items():
        if isinstance(node, dict):
            (folder / name).mkdir()
            lay_out(node, folder / name)
        else:
            file, version = node
            (folder / name).write_bytes(file.content(version))


def _found(
    folder: Folder,
    entries: Callable[[Folder], dict[str, File | Folder]],
    version: Callable[[File], int],
) -> Found:
    return {
        name: (node, version(node)) if isinstance(node, File) else _found(node, entries, version)
        for name, node in entries(folder).items()
    }


def _read(folder: Path) -> Folder:
    return Folder(
        {path.name: _read(path) if path.is_dir() else File(path.read_bytes()) for path in folder.iterdir()}
    )


def _learn(folder: Folder, real: Path) -> None:
    assert sorted(folder.now) == sorted(os.listdir(real)), f"the trace has missed steps in {real}"
    for name, node in folder.now.items():
        if isinstance(node, Folder):
            _learn(node, real / name)
        else:
            node.last = (real / name).read_bytes()
