"""Saves that die or fail at every one of their steps: a prepared process that forks one for each (test_checkpoint_faults.py).

It is started with the library of file_steps.c, reads orders as lines of JSON, and answers each with a line of JSON:
`{"what": "deaths" | "errors" | "power", "way": {fields of Way}, ...}`. Every order counts what was found; `bad` lists what must not be.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from file_steps import Step, read, refused, watching
from marked_run import MarkedRun, home, leftovers
from power_loss import Disk, lay_out

from acc_ops.testing import run_threads
from acc_trainer.checkpoint import check_whole, newest_whole

OLD, DYING, NEW, NEXT = 10, 15, 20, 30  # marks of the saves, in order
NOTE = "notes/of the user.txt"


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the runs save. `died_at` has a save before die there: before its n-th rename that goes on in the name of a checkpoint."""

    named: bool = True  # else automatic names, of which one stays
    first: bool = False  # nothing has been saved before
    exchange: bool = True  # the file system swaps two folders in one call
    background: bool = False
    ranks: int = 1  # threads
    died_at: int = 0


class Bench:
    """A folder in which the runs of one order are repeated, each from a copy of the same beginning."""

    def __init__(self, folder: Path, way: Way) -> None:
        self.folder, self.way = folder, way
        self.begin = folder / "begin"
        self.begin.mkdir()
        self._numbers = itertools.count()
        if not way.first:
            self.save(self.begin, OLD)
            note = home(self.begin, way.named) / "latest" / NOTE
            if way.named:
                note.parent.mkdir()
                note.write_text("mine")
        if way.died_at:
            steps = [s for s in self.trace(DYING)[1] if s.kind == "rename" and ".writing/" not in s.path]
            self.save(self.begin, DYING, die_at=steps[way.died_at].number)
        self.old = None if way.first else in_child(self.load, self.begin)

    def copy(self) -> Path:
        """A new folder as it was in the beginning."""
        return Path(shutil.copytree(self.begin, self.folder / str(next(self._numbers))))

    def save(self, case: Path, mark: int, **faults: Any) -> bool:
        """Load what there is and save in a child; whether it came to the end, False when it died of its fault."""
        return in_child(lambda: {"found": self._resume_and_save(case, mark, **faults)}) is not None

    def trace(self, mark: int) -> tuple[Path, list[Step]]:
        """The folder after a save without faults, and the steps of the save."""
        case, log = self.copy(), self.folder / "log"
        log.unlink(missing_ok=True)
        self.save(case, mark, log=log)
        return case, read(log)

    def load(self, case: Path) -> int:
        """The mark of the newest checkpoint, in this process."""
        marks = self._everyone(lambda: self._run(case).load())
        assert len(set(marks)) == 1, f"the ranks have loaded {marks}"
        return marks[0]

    def go_on(self, case: Path) -> int | None:
        """What the next process finds: the mark it loads, None for nothing. AssertionError unless it can save and clears up."""
        found = self._resume_and_save(case, NEXT)
        self.check_after(case, found)
        return found

    def check_after(self, case: Path, found: int | None) -> None:
        """After the save of `NEXT`: it is there, alone, with the user's note over one name."""
        place = home(case, self.way.named)
        newest = newest_whole(place)
        assert newest is not None
        assert check_whole(newest, checksums=True).step == NEXT
        assert not leftovers(place), f"left behind: {leftovers(place)}"
        assert len(os.listdir(place)) == 1, f"more than one checkpoint: {os.listdir(place)}"
        if self.way.named and found is not None and not self.way.first:
            assert (place / "latest" / NOTE).read_text() == "mine"

    def fail(self, case: Path, at: int, faults: dict[str, Any]) -> tuple[str | None, Path]:
        """Save with an error at a step and once more without, in this process; what was said, and a copy of the folder in between."""
        run = self._run(case)
        if not self.way.first:
            run.load()
        run.mark(NEW)
        said = None
        with watching(case, fail_at=at, no_exchange=not self.way.exchange, **faults):
            try:
                run.save()
            except Exception as error:  # noqa: BLE001  whatever a save says of a disk
                said = f"{type(error).__name__}: {error}"
        between = Path(shutil.copytree(case, f"{case}-between"))
        assert run.value() == NEW, "a save that failed has changed the run"
        run.mark(NEXT)
        run.save()
        return said, between

    def _run(self, case: Path) -> MarkedRun:
        way = self.way
        return MarkedRun(case, named=way.named, background=way.background, generators=way.ranks == 1)

    def _resume_and_save(self, case: Path, mark: int, **faults: Any) -> int | None:
        def one() -> int | None:
            run = self._run(case)
            found = run.load() if newest_whole(home(case, self.way.named)) else None
            run.mark(mark)
            run.accelerator.wait_for_everyone()
            sees = run.accelerator.is_main_process and faults
            with watching(case, no_exchange=not self.way.exchange, **faults) if sees else nullcontext():
                run.accelerator.wait_for_everyone()
                run.save()
            return found

        found = self._everyone(one)
        assert len(set(found)) == 1, f"the ranks have loaded {found}"
        return found[0]

    def _everyone(self, do: Callable[[], Any]) -> list[Any]:
        return [do()] if self.way.ranks == 1 else run_threads(self.way.ranks, do)


def deaths(bench: Bench, every: int = 1) -> dict[str, Any]:
    """A death before every step, or `every` so many: the next process must find the old or the new checkpoint, and be able to save."""
    steps = bench.trace(NEW)[1]
    total = len(steps)
    if bench.way.died_at:  # once the folder is as before a save, the rest is that of any save
        total = next(step.number for step in steps if step.kind == "open" and ".writing/" in step.path)
    counts: Counter[str] = Counter()
    bad: list[str] = []
    known: dict[str, int | None] = {}
    for at in range(1, total + 1, every):
        case = bench.copy()
        if bench.save(case, NEW, die_at=at):
            bad.append(f"step {at}: the save did not come to it")
            continue
        left = _digest(case)
        try:
            found = known[left] if left in known else in_child(bench.go_on, case)
        except ChildFailed as error:
            bad.append(f"death before step {at}: {error}")
            continue
        known[left] = found
        names = {bench.old: "old", NEW: "new"}
        counts[names.get(found, "lost")] += 1
        if found not in names:
            bad.append(f"death before step {at}: found {found}, there had been {bench.old}")
        shutil.rmtree(case)
    return {
        "steps": total,
        "deaths": len(range(1, total + 1, every)),
        "folders": len(known),
        **counts,
        "bad": bad,
    }


def errors(bench: Bench, number: int, kinds: list[str], only: list[int] | None = None) -> dict[str, Any]:
    """An error at every step of some kinds: the save says so and names the folder, what was there stays, and the next save works."""
    counts: Counter[str] = Counter()
    bad = []
    for step in bench.trace(NEW)[1]:
        if step.kind not in kinds or step.error or (only and step.number not in only):
            continue
        counts["steps"] += 1
        case = bench.copy()
        every = refused(step.kind, number)
        faults = {"error": number, "kinds": every, "always": len(every) > 1, "half": step.kind == "write"}
        where = f"{os.strerror(number)} at {step.kind} of {os.path.relpath(step.path, bench.begin.parent)} ({step.number})"
        try:
            said, between = in_child(bench.fail, case, step.number, faults)
            found = in_child(_found, bench, Path(between), case)
        except ChildFailed as error:
            bad.append(f"{where}: {error}")
            continue
        counts["raised" if said else "went on"] += 1
        if said is None and found != NEW:
            bad.append(f"{where}: nothing was said, and {found} is there")
        if said is not None and str(home(case, bench.way.named)) not in said:
            bad.append(f"{where}: the folder is not named: {said[:300]}")
        if found not in (bench.old, NEW):
            bad.append(f"{where}: found {found}, there had been {bench.old}")
        shutil.rmtree(case)
        shutil.rmtree(between)
    return {**counts, "bad": bad}


def power(bench: Bench, draws: int) -> dict[str, Any]:
    """A power loss after every step: whatever of what was not synced is gone, the old or the new checkpoint is whole."""
    case, steps = bench.trace(NEW)
    disk = Disk(bench.begin, case)
    chance = random.Random(7)
    found = {}  # what may be found, once each, and after which step at the latest
    for step in steps:
        disk.make(step)
        found.update({repr(state): (step.number, state) for state in disk.found(draws, chance)})
    disk.end(case)
    counts: Counter[str] = Counter()
    bad = []
    for number, state in found.values():
        folder = Path(tempfile.mkdtemp(dir=bench.folder))
        lay_out(state, folder)
        place = newest_whole(home(folder, bench.way.named))
        mark = None if place is None else check_whole(place, checksums=True).step
        counts["new" if mark == NEW else "old"] += 1
        if place and bench.way.named and not bench.way.first and not (place / NOTE).is_file():
            bad.append(
                f"power loss after step {number} of {len(steps)}: the user's file is gone from {place.name}"
            )
        if mark not in (bench.old, NEW) or (number == len(steps) and mark != NEW):
            bad.append(f"power loss after step {number} of {len(steps)}: found {mark}")
        shutil.rmtree(folder)
    return {"steps": len(steps), "folders": len(found), **counts, "bad": bad}


def _digest(folder: Path) -> str:
    """What lies in a folder: two deaths before and after a sync leave the same, and the second need not be tried again."""
    names = [path for path in sorted(folder.rglob("*")) if path.suffix != ".lock"]  # those name the process
    text = [(str(path.relative_to(folder)), path.is_file() and path.read_bytes()) for path in names]
    return hashlib.sha256(repr(text).encode()).hexdigest()


def _found(bench: Bench, between: Path, case: Path) -> int | None:
    found = bench.load(between) if newest_whole(home(between, bench.way.named)) else None
    bench.check_after(case, found)
    return found


class ChildFailed(RuntimeError):
    """A child ended with an exception."""


def in_child(do: Callable[..., Any], *args: Any) -> Any:
    """What `do` returns in a forked process; None when that was killed. ChildFailed when it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            torch.set_num_threads(
                1
            )  # torch makes its pool anew after a fork, which two threads at once break
            answer = {"value": do(*args)}
            code = 0
        except BaseException as error:  # noqa: BLE001  told to the parent
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            answer = {"error": "".join(lines[-1:]).strip() + " | " + "".join(lines[-4:-1])[-600:]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe, default=str)
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"a child died of signal {os.WTERMSIG(status)}"
        return None
    answer = json.loads(text)
    if "error" in answer:
        raise ChildFailed(answer["error"])
    return answer["value"]


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"deaths": deaths, "errors": errors, "power": power}


def _warm_up() -> None:
    """Load here what every forked process would load again. One thread: a fork has no others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), Way())
        bench.go_on(bench.copy())


def main() -> None:
    _warm_up()
    for line in sys.stdin:
        order = json.loads(line)
        what, way = order.pop("what"), Way(**order.pop("way"))
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = ORDERS[what](Bench(Path(folder), way), **order)
            except Exception:  # noqa: BLE001  the test shows it
                answer = {"bad": [traceback.format_exc()]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
