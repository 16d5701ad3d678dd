"""One save, from the staging folder to the pruning of old checkpoints; its second half runs in any thread."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from acc_ops.world import World
from acc_plugins.options.project import CheckpointPolicy
from acc_plugins.states.part import Part, for_each

from . import commit, layout
from .manifest import Manifest, described, files_of
from .owner import Owner
from .rotate import prune
from .together import together


class Transaction:
    """The staging folder on the disk that this rank sees. In order: `begin`, and `write` or, when it does not come to that, `discard`.

    Rank 0 leads on its disk. On a machine that does not see rank 0's staging folder, the first process leads.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = layout.staging_of(target)
        self.leads = False
        self.is_committed = False
        self._owner: Owner | None = None

    def begin(self, world: World) -> None:
        """An empty staging folder on every disk, which is this run's until the end. CheckpointError when another run saves there now."""
        with self._together(world, "making room for"):
            if world.is_main:
                self._make_room()
        with together(world, f"making room for {self.target} on every machine"):
            self.leads = self.leads or (world.is_local_main and not self.folder.is_dir())
        with self._together(world, "making room on every machine for"):
            if self.leads and not world.is_main:
                self._make_room()

    def write(
        self, world: World, parts: Iterable[Part], manifest: Manifest, policy: CheckpointPolicy | None
    ) -> None:
        """Write the parts, make them the content of the target, and delete the checkpoints that `policy` does not keep.

        `world` may be one of `meeting.apart`, in another thread; a failure on one rank raises on all.
        """
        try:
            self._write(world, parts, manifest, policy)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Take away what was staged; the old checkpoint stays."""
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._let_go()
            self.leads = False  # from now on another run may stage there

    def _write(
        self, world: World, parts: Iterable[Part], manifest: Manifest, policy: CheckpointPolicy | None
    ) -> None:
        with self._together(world, "writing"):
            written = self._write_parts(parts, getattr(world.comm, "group", None))
            own = described(
                self.folder, written
            )  # each rank reads its own files: they are still in its memory
        told = world.comm.all_gather_object(own)
        with self._together(world, "finishing"):
            if self.leads:
                known = {name: file for files in [*told, own] for name, file in files.items()}
                commit.finish(self.folder, self.target, replace(manifest, files=files_of(self.folder, known)))
        self.is_committed = True
        with self._together(world, "deleting checkpoints older than"):
            if self.leads:
                prune(self.target.parent, self.target, policy)
                self._let_go()

    def _write_parts(self, parts: Iterable[Part], group: Any) -> list[str]:
        """The names of the files."""
        written: list[str] = []
        for_each(parts, lambda part: written.extend(part.write(self.folder, group)))
        return written

    @contextmanager
    def _together(self, world: World, doing: str) -> Iterator[None]:
        """`together`, with the target in the errors of a disk that do not name a whole path: those of a write, a sync, a removed folder."""
        with together(world, f"{doing} {self.target}"):
            try:
                yield
            except OSError as error:
                if not (isinstance(error.filename, str) and os.path.isabs(error.filename)):
                    error.filename = str(self.target)
                raise

    def _make_room(self) -> None:
        commit.make_lasting(self.target.parent)
        self._owner = Owner(self.target)
        self.leads = True
        commit.begin(self.target)

    def _let_go(self) -> None:
        if self._owner is not None:
            self._owner.release()
