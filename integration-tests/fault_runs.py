"""Saves that die, fail or lose their power at every one of their steps: a prepared process that answers orders (test_checkpoint_faults.py).

It is started with the library of file_steps.c, reads orders as lines of JSON, and answers each with a line of JSON:
`{"what": "deaths" | "errors" | "power", "way": {fields of Way}, ...}`. Every order traces a save to learn its steps, and counts what was found;
`bad` lists what must not be.

[Note: what makes a death cheap] Who dies is a fork of a run that has been built and has loaded; only ranks that speak to each other must be made anew,
since a group cannot be forked. Equal folders are looked at once, one after the other in one process. Lanes share the work.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fault_bench import NEW, NEXT, NOTE, At, Bench, Way, digest, log_of
from file_steps import Step, read, refused, relative
from forked import LANES, Forks, Killed, in_child, in_lanes
from marked_run import MarkedRun, home
from power_loss import Disk, Found, lay_out

from acc_trainer.checkpoint import check_whole, newest_whole

MEMORY = Path("/dev/shm")  # syncs cost nothing there


class Death(NamedTuple):
    """What a death has left: the digest of the folder, whether another rank took the save for done, and what went wrong with the death."""

    left: str
    saved: bool
    problem: str


class Said(NamedTuple):
    """What a rank says of one try: what it found there, the error that its save raised, and what must not be."""

    found: int | None = None
    error: str | None = None
    problem: str = ""


def deaths(bench: Bench) -> dict[str, Any]:
    """A death of each rank before each of its steps: the next process must find the old or the new checkpoint, and be able to save."""
    traces = bench.trace(NEW)
    places = [At(rank, step.number) for rank, steps in enumerate(traces) for step in steps]
    if bench.way.died_at:  # once the folder is as before a save, the rest is that of any save
        end = next(step.number for step in traces[0] if step.kind == "open" and ".writing/" in step.path)
        places = [at for at in places if at.number <= end]
    if bench.way.careless:  # it begins as every other
        places = places[len(places) // 2 :]
    kept = bench.folder / "kept"
    kept.mkdir()
    made = [death for (death,) in in_lanes(places, lambda lane, mine: _die(bench, lane, kept, mine, traces))]
    left = sorted({death.left for death in made})
    known = dict(
        zip(left, in_lanes(left, lambda _, mine: _look(bench, kept, mine), bench.way.ranks), strict=True)
    )
    counts: Counter[str] = Counter()
    bad = []
    for at, death in zip(places, made, strict=True):
        said = known[death.left]
        found = {one.found for one in said}
        problems = [death.problem, *(one.problem for one in said)]
        if not any(problems):
            counts[_name(bench, found)] += 1
            if found - {bench.old, NEW} or len(found) > 1 or (death.saved and found != {NEW}):
                also = ", and another rank had saved" if death.saved else ""
                problems.append(f"found {found}, there had been {bench.old}{also}")
        bad += [f"death of rank {at.rank} before step {at.number}: {text}" for text in problems if text]
    return {"steps": sum(map(len, traces)), "deaths": len(made), "folders": len(left), **counts, "bad": bad}


def _die(
    bench: Bench, lane: int, kept: Path, places: Sequence[At], traces: Sequence[Sequence[Step]]
) -> list[Death]:
    """Die at each of the places; what is left goes to `kept`, under its digest."""
    made, run, case = [], None, bench.case_of(lane)
    log = case.with_name(f"log {lane}")
    for at in places:
        bench.begin_again(case)
        for rank in range(bench.way.ranks):
            log_of(log, rank).unlink(missing_ok=True)
        if bench.way.ranks == 1 and run is None:
            run = bench.resumed(case)[0]
        die = partial(_die_once, bench, case, run, log, at)
        outcomes = Forks(die, bench.way.ranks).outcomes()
        done = relative(read(log_of(log, at.rank)), case)
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != at.rank]
        problem = ""
        if not isinstance(outcomes[at.rank], Killed):
            problem = f"it was not killed but {outcomes[at.rank] or 'saved'}"
        elif done != relative(traces[at.rank][: at.number - 1], bench.traced):
            problem = f"it died elsewhere, after {done[-1:]}"
        elif any(str(outcome) == "it did not end" for outcome in others):
            problem = "another rank did not end"
        left = digest(case)
        if not (kept / left).is_dir():
            with suppress(OSError):  # another lane was faster
                os.rename(case, kept / left)
        made.append(Death(left, None in others, problem))
    return made


def _die_once(bench: Bench, case: Path, run: MarkedRun | None, log: Path, at: At) -> None:
    """Each rank: save, and die if it is the one."""
    bench.save(case, NEW, run or bench.built(case), log=log, die=at)


def _look(bench: Bench, kept: Path, names: Sequence[str]) -> list[Said]:
    """Each rank: what the next process finds in each folder."""
    said = []
    for name in names:
        try:
            said.append(Said(found=bench.go_on(kept / name)))
        except Exception:  # noqa: BLE001  a finding
            said.append(Said(problem=_told()))
    return said


def errors(bench: Bench, kinds: dict[str, list[str]]) -> dict[str, Any]:
    """Errors, each (its number) at every step of its kinds: the save says so on all ranks and names the folder, what was there stays, and the
    next save works."""
    traces = bench.trace(NEW)
    places = [
        (int(number), At(rank, step.number), step)
        for number, those in kinds.items()
        for rank, steps in enumerate(traces)
        for step in steps
        if step.kind in those and not step.error
    ]
    counts: Counter[str] = Counter(steps=len(places))
    bad = []
    for lane in range(LANES):
        bench.begin_again(bench.case_of(lane))
    made = in_lanes(places, lambda lane, mine: _fail(bench, lane, mine), bench.way.ranks)
    for (number, at, step), said in zip(places, made, strict=True):
        found, raised = {one.found for one in said}, [one.error for one in said if one.error is not None]
        problems = [one.problem for one in said]
        if not any(problems):
            counts["raised" if raised else "went on"] += 1
            if found - {bench.old, NEW} or len(found) > 1 or (not raised and found != {NEW}):
                problems.append(f"found {found}, there had been {bench.old}, and {raised} was said")
            if raised and len(raised) < len(said):
                problems.append(f"not all ranks said it: {raised}")
            problems += [
                f"the folder is not named: {text[:300]}" for text in raised if str(bench.folder) not in text
            ]
        path = os.path.relpath(step.path, bench.traced)
        where = f"{os.strerror(number)} on rank {at.rank} at {step.kind} of {path} ({step.number})"
        bad += [f"{where}: {text}" for text in problems if text]
    return {**counts, "bad": bad}


def _fail(bench: Bench, lane: int, places: Sequence[tuple[int, At, Step]]) -> list[Said]:
    """Each rank: one run meets one error after the other, and saves again behind each."""
    case, said = bench.case_of(lane), []
    run = bench.resumed(case)[0]
    project = run.accelerator.project_configuration
    number = project.iteration
    known = {digest(bench.begin): bench.old}
    for place in places:
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process:
            bench.begin_again(case)
        run.accelerator.wait_for_everyone()
        project.iteration = number
        try:
            said.append(_fail_once(bench, case, run, place, known))
        except Exception:  # noqa: BLE001  a finding
            said.append(Said(problem=_told()))
    return said


def _fail_once(
    bench: Bench, case: Path, run: MarkedRun, place: tuple[int, At, Step], known: dict[str, int | None]
) -> Said:
    """Each rank: save with the error and once more without. `known` are folders whose content has been loaded."""
    number, at, step = place
    kinds = refused(step.kind, number)
    run.mark(NEW)
    error = None
    with bench.watched(
        run, case, fail=at, error=number, kinds=kinds, always=len(kinds) > 1, half=step.kind == "write"
    ):
        try:
            run.save()
        except Exception as raised:  # noqa: BLE001  whatever a save says of a disk
            error = f"{type(raised).__name__}: {raised}"
        run.accelerator.wait_for_everyone()
    left = digest(case)
    if left not in known:
        known[left] = bench.resumed(case)[1]
    run.mark(NEXT)
    run.save()
    bench.check_after(case, known[left])
    return Said(found=known[left], error=error)


def power(bench: Bench, draws: int) -> dict[str, Any]:
    """A power loss after every step: whatever of what was not synced is gone, the old or the new checkpoint is whole."""
    (steps,) = bench.trace(NEW)
    disk = Disk(bench.begin, bench.traced)
    chance = random.Random(7)
    may_be: dict[
        str, tuple[int, Found]
    ] = {}  # what may be found, once each, and after which step at the latest
    for step in steps:
        disk.make(step)
        may_be.update({repr(state): (step.number, state) for state in disk.found(draws, chance)})
    disk.end(bench.traced)
    states = list(may_be.values())
    made = in_lanes(states, lambda _, mine: [_come_back(bench, state) for _, state in mine])
    counts: Counter[str] = Counter()
    bad = []
    for (number, _), (said,) in zip(states, made, strict=True):
        problem = said.problem
        counts[_name(bench, {said.found})] += 1
        if said.found not in (bench.old, NEW) or (number == len(steps) and said.found != NEW):
            problem = f"found {said.found} {problem}"
        if problem:
            bad.append(f"power loss after step {number} of {len(steps)}: {problem}")
    return {"steps": len(steps), "folders": len(states), **counts, "bad": bad}


def _come_back(bench: Bench, state: Found) -> Said:
    """What there is after a power loss that has left `state`."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        lay_out(state, Path(folder))
        place = newest_whole(home(Path(folder), bench.way.named))
        if place is None:
            return Said()
        lost = bench.way.named and not bench.way.first and not (place / NOTE).is_file()
        return Said(
            found=check_whole(place, checksums=True).step,
            problem=f"the user's file is gone from {place.name}" if lost else "",
        )


def _name(bench: Bench, found: set[int | None]) -> str:
    return "old" if found == {bench.old} else "new" if found == {NEW} else "lost"


def _told() -> str:
    """The exception that is being handled, in short."""
    return " | ".join(line.strip() for line in reversed(traceback.format_exc(limit=-3).splitlines()))[:900]


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"deaths": deaths, "errors": errors, "power": power}


def _warm_up() -> None:
    """Load here what every fork would load again. One thread, and no group of ranks: a fork has neither."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        run = MarkedRun(Path(folder, "one"), named=True, background=True)
        run.mark(NEW)
        run.save()
        run.load()
        run.accelerator.end_training()
        bench = Bench(Path(folder), Way(ranks=2, sharded=True))
        for name in in_child(lambda: bench.go_on(bench.begin) and list(sys.modules), 2):
            with suppress(ImportError):
                import_module(name)
    gc.freeze()  # a collection in a fork would copy all that it looks at


def main() -> None:
    _warm_up()
    for line in sys.stdin:
        order = json.loads(line)
        what, way = order.pop("what"), Way(**order.pop("way"))
        with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
            try:
                answer = ORDERS[what](Bench(Path(folder), way), **order)
            except Exception:  # noqa: BLE001  the test shows it
                answer = {"bad": [traceback.format_exc()]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
