"""A folder in which a save is repeated from one beginning, with a death or an error at a chosen step, on one rank or several."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from file_steps import Step, read, watching
from forked import Forks, Killed, in_child
from marked_run import MarkedRun, home, leftovers

from acc_trainer.checkpoint import check_whole, commit, newest_whole
from acc_trainer.checkpoint.manifest import Manifest
from acc_trainer.checkpoint.rotate import next_number

OLD, DYING, NEW, NEXT = 10, 15, 20, 30  # marks of the saves, in order
NOTE = "notes/of the user.txt"
together = import_module("acc_trainer.checkpoint.together")  # the package has a function of that name
_finish = commit.finish


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the runs save. `died_at` has a save before die there: before its n-th rename that goes on in the name of a checkpoint."""

    named: bool = True  # else automatic names, of which one stays
    first: bool = False  # nothing has been saved before
    exchange: bool = True  # the file system swaps two folders in one call
    background: bool = False
    ranks: int = 1  # processes
    sharded: bool = False
    died_at: int = 0
    careless: bool = (
        False  # the new save deletes the old checkpoint before it takes its name: what the tests must notice
    )


class At(NamedTuple):
    """Where something happens to a save: before step `number` of `rank`. Steps count from 1."""

    rank: int
    number: int


NOWHERE = At(0, 0)


class Bench:
    """The folder of one order. What begins with the words "each rank" runs in a fork, on all ranks at once."""

    def __init__(self, folder: Path, way: Way) -> None:
        self.folder, self.way = folder, way
        self.begin, self.traced = folder / "begin", folder / "traced"
        self.begin.mkdir()
        if not way.first:
            in_child(lambda: self.save(self.begin, OLD), way.ranks)
            if way.named:
                note = self.begin / "latest" / NOTE
                note.parent.mkdir()
                note.write_text("mine")
        if way.died_at:
            renames = [s for s in self.trace(DYING)[0] if s.kind == "rename" and ".writing/" not in s.path]
            at = At(0, renames[way.died_at].number)
            assert isinstance(Forks(lambda: self.save(self.begin, DYING, die=at)).outcomes()[0], Killed)
        self.old: int | None = in_child(lambda: self.resumed(self.begin)[1], way.ranks)

    def trace(self, mark: int) -> list[list[Step]]:
        """The steps of each rank in a save without faults, which is made in `traced`."""
        self.begin_again(self.traced)
        log = self.folder / f"log of {mark}"
        in_child(lambda: self.save(self.traced, mark, log=log), self.way.ranks)
        return [read(log_of(log, rank)) for rank in range(self.way.ranks)]

    def begin_again(self, case: Path) -> None:
        """`case` is as it was in the beginning."""
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self.begin, case)

    def case_of(self, lane: int) -> Path:
        """The folder in which a lane repeats the save."""
        return self.folder / f"lane {lane}"

    def built(self, case: Path) -> MarkedRun:
        """Each rank: a run that has loaded nothing, but whose automatic names go on behind what lies there."""
        way = self.way
        run = MarkedRun(
            case, named=way.named, background=way.background, sharded=way.sharded, single=way.sharded
        )
        run.accelerator.project_configuration.iteration = next_number(home(case, way.named))
        return run

    def resumed(self, case: Path) -> tuple[MarkedRun, int | None]:
        """Each rank: a run that has loaded what lies there, and the mark of that, None for nothing."""
        run = self.built(case)
        return run, run.load() if self._newest(case) else None

    def save(self, case: Path, mark: int, run: MarkedRun | None = None, **faults: Any) -> None:
        """Each rank: save in `run`, or in one that is resumed there."""
        run = run or self.resumed(case)[0]
        run.mark(mark)
        if self.way.careless and mark == NEW:
            commit.finish = _delete_first
        if "die" in faults:
            together._tell = _say_nothing  # it would wait a minute for who is dead to hear of it
        run.accelerator.wait_for_everyone()
        with self.watched(run, case, **faults):
            run.save()

    def watched(
        self,
        run: MarkedRun,
        case: Path,
        log: Path | None = None,
        die: At = NOWHERE,
        fail: At = NOWHERE,
        **how: Any,
    ) -> AbstractContextManager[None]:
        """Each rank: `watching`, with a log of its own, where one rank may die or fail."""
        rank = run.accelerator.process_index
        return watching(
            case,
            log_of(log, rank) if log else None,
            die_at=die.number if rank == die.rank else 0,
            fail_at=fail.number if rank == fail.rank else 0,
            no_exchange=not self.way.exchange,
            **how,
        )

    def go_on(self, case: Path) -> int | None:
        """Each rank: what the next process finds. AssertionError unless it can save, and clears up."""
        run, found = self.resumed(case)
        self.save(case, NEXT, run)
        self.check_after(case, found)
        return found

    def check_after(self, case: Path, found: int | None) -> None:
        """After the save of `NEXT`: it is there, alone, with the user's note over one name if something had been `found`."""
        place, newest = home(case, self.way.named), self._newest(case)
        assert newest is not None, "nothing that is whole is there after a save"
        assert check_whole(newest, checksums=True).step == NEXT
        assert not leftovers(place), f"left behind: {leftovers(place)}"
        assert len(os.listdir(place)) == 1, f"more than one checkpoint: {os.listdir(place)}"
        if self.way.named and found is not None and not self.way.first:
            assert (place / "latest" / NOTE).read_text() == "mine"

    def _newest(self, case: Path) -> Path | None:
        return newest_whole(home(case, self.way.named))


def log_of(log: Path, rank: int) -> Path:
    """The file in which a rank writes down its steps."""
    return log.with_name(f"{log.name} of rank {rank}")


def digest(folder: Path) -> str:
    """What lies in a folder: two deaths before and after a sync leave the same, and the second need not be looked at again."""
    text = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else None
        if path.suffix == ".lock":  # it names the process
            content = content and b"signed"
        text.append((str(path.relative_to(folder)), content))
    return hashlib.sha256(repr(text).encode()).hexdigest()


def _delete_first(staging: Path, target: Path, manifest: Manifest) -> None:
    shutil.rmtree(target, ignore_errors=True)
    _finish(staging, target, manifest)


def _say_nothing(*_: Any) -> None:
    return None
