"""Kills a run of two ranks while it saves, again and again, and looks whether a checkpoint was ever lost, mixed or unreadable.

`hatch run campaign` makes 320 kills in about six minutes: of one rank or of both, at random instants (a tenth of them while the run is
still loading), of runs that save over one name and of runs with automatic names and `total_limit=1`, blocking and in the background. With
`--sharded` some runs are sharded by FSDP2, and in a third of their kills rank 1 dies by itself while it writes its shards.
After each kill two fresh processes load what is there, check that all of it is of one save, and of one that is not older than the last
save that had returned, and go on saving until they are killed. Exit code 0 when nothing was found, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "integration-tests"))
from marked_run import MarkedRun, home

from acc_trainer.checkpoint import newest_whole

RANKS = 2
WIDTH = 300  # about 1.1 MB of model and optimizer
START_S = 120.0  # until two ranks have loaded, on a busy machine
GRACE_S = 0.2  # what the surviving rank may do before it is killed as well
LOADED, BEGUN, RETURNED = range(3)  # the columns of a board
NOTHING, UNKNOWN = 0, -1


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the runs save."""

    named: bool
    background: bool
    sharded: bool = False

    def __str__(self) -> str:
        how = "in the background" if self.background else "blocking"
        kind = ", sharded" if self.sharded else ""
        return f"{'over one name' if self.named else 'automatic names, one stays'}, {how}{kind}"


WAYS = [Way(named=named, background=background) for background in (False, True) for named in (True, False)]
SHARDED = [
    Way(named=named, background=background, sharded=True)
    for named, background in ((True, False), (False, True))
]


class Board:
    """What each rank has come to, in memory that the kills leave alone: the mark it loaded, began to save, and saw saved."""

    def __init__(self) -> None:
        self._cells = RawArray("q", [UNKNOWN] * (3 * RANKS))

    def put(self, rank: int, column: int, value: int) -> None:
        self._cells[3 * rank + column] = value

    def of(self, column: int) -> list[int]:
        return [self._cells[3 * rank + column] for rank in range(RANKS)]


@dataclass
class Counts:
    """What a campaign has done and found."""

    kills: Counter[str] = field(default_factory=Counter)
    saves: int = 0
    unreadable: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)  # runs that could not go on, without having been killed

    def found(self) -> dict[str, list[str]]:
        names = ("unreadable", "mixed", "lost", "stopped")
        return {name: getattr(self, name) for name in names}


class Campaign:
    """One folder in which runs are killed and resumed."""

    def __init__(self, folder: Path, way: Way, chance: random.Random, counts: Counts) -> None:
        self.folder, self.way, self.chance, self.counts = folder, way, chance, counts
        self.least, self.most = NOTHING, NOTHING  # marks that the next load may find
        self.span_s = 0.15  # kills come within this time after the load
        self.dies_at = 0  # the part of which rank 1 dies while it writes it
        self.log = folder.with_name(f"{folder.name}.log")
        folder.mkdir()

    def kill_once(self) -> None:
        """Start two ranks, let them load and save, and kill one or both of them."""
        board = Board()
        by_itself = self.way.sharded and self.chance.random() < 1 / 3
        self.dies_at = self.chance.randint(1, 4) if by_itself else 0
        ranks = self._start(board)
        loading = not by_itself and self.chance.random() < 0.1 and self.most > NOTHING
        with _ended(ranks):
            if loading:
                time.sleep(self.chance.uniform(0.0, 0.3))
            elif not self._loaded(board, ranks):
                return
            elif by_itself:
                os.waitid(os.P_PID, ranks[1], os.WEXITED | os.WNOWAIT)
                self.counts.kills["of rank 1 while it writes its shards"] += 1
                self.counts.kills[self._phase(board, 1)] += 1
                time.sleep(self.chance.uniform(0.0, GRACE_S))
                self._settle(board)
                return
            else:
                time.sleep(self.chance.uniform(0.0, self.span_s))
            if any(os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks):
                self._report(self.counts.stopped, "a rank ended by itself")
                return
            one = self.chance.choice([None, *range(RANKS)])
            victims = ranks if one is None else [ranks[one]]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            self.counts.kills["of all ranks" if one is None else "of one rank"] += 1
            self.counts.kills[self._phase(board, 0 if one is None else one)] += 1
            if one is not None:
                time.sleep(self.chance.uniform(0.0, GRACE_S))
        self._settle(board)

    def end(self) -> None:
        """A last run, that is not killed: it loads and saves once more."""
        board, self.dies_at = Board(), 0
        ranks = self._start(board, last=True)
        with _ended(ranks):
            if self._loaded(board, ranks):
                statuses = [os.waitpid(rank, 0)[1] for rank in list(ranks)]
                ranks.clear()
                if any(statuses):
                    self._report(self.counts.stopped, f"the last run ended with {statuses}")

    def _start(self, board: Board, last: bool = False) -> list[int]:
        port = _free_port()
        self.log.write_bytes(b"")
        ranks = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                _be_rank(self, board, rank, port, last)
            ranks.append(child)
        return ranks

    def _loaded(self, board: Board, ranks: list[int]) -> bool:
        """Wait until both ranks have loaded, and judge what they found."""
        until = time.monotonic() + START_S
        while UNKNOWN in board.of(LOADED):
            gone = any(os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks)
            if gone and UNKNOWN in board.of(LOADED):
                text = self.log.read_text()
                if "EADDRINUSE" in text:  # somebody else took the port meanwhile: no kill this time
                    return False
                kind = self.counts.mixed if "parts of several saves" in text else self.counts.unreadable
                self._report(kind, "a rank could not load")
                return False
            if time.monotonic() > until:
                self._report(self.counts.stopped, f"not loaded within {START_S:g} s")
                return False
            time.sleep(0.002)
        found = board.of(LOADED)
        if len(set(found)) > 1:
            self._report(self.counts.mixed, f"the ranks have loaded {found}")
            return False
        if not self.least <= found[0] <= self.most:
            self._report(self.counts.lost, f"loaded {found[0]}, saved were {self.least} to {self.most}")
            return False
        self.least = self.most = found[0]
        return True

    def _settle(self, board: Board) -> None:
        """What the next load may find: at least the last save that returned on any rank, at most the last that began."""
        returned, begun = max(board.of(RETURNED)), max(board.of(BEGUN))
        saves = max(0, returned - self.least)
        self.counts.saves += saves
        if begun > UNKNOWN and not saves:  # a busy machine has not come to the end of one
            self.span_s = min(1.5 * self.span_s, 10.0)
        elif saves > 2:
            self.span_s *= 0.8
        self.least, self.most = max(self.least, returned), max(self.most, begun)

    def _phase(self, board: Board, rank: int) -> str:
        if board.of(LOADED)[rank] == UNKNOWN:
            return "while starting or loading"
        begun, returned = board.of(BEGUN)[rank], board.of(RETURNED)[rank]
        if begun == UNKNOWN:
            return "before a save"
        return "while saving" if begun > returned else "after a save"

    def _report(self, kind: list[str], what: str) -> None:
        kind.append(f"{self.way}: {what}\n{self.log.read_text()}")


def run_campaign(kills: int, ways: list[Way], folder: Path, seed: int) -> Counts:
    """Make `kills` kills in all, in turn over `ways`, below `folder`."""
    torch.set_num_threads(1)  # a fork takes no other threads along
    warnings.simplefilter("ignore")
    _warm_up(folder / "warm-up", sharded=any(way.sharded for way in ways))
    chance, counts = random.Random(seed), Counts()
    campaigns = [Campaign(folder / str(index), way, chance, counts) for index, way in enumerate(ways)]
    for kill in range(kills):
        campaigns[kill % len(campaigns)].kill_once()
        if (kill + 1) % 40 == 0:
            print(f"{kill + 1} kills, {counts.saves} saves", file=sys.stderr, flush=True)
        if sum(map(len, counts.found().values())) > 5:
            return counts
    for campaign in campaigns:
        campaign.end()
    return counts


def _be_rank(campaign: Campaign, board: Board, rank: int, port: int, last: bool) -> None:
    """A forked process: load, then save until it is killed. Never returns."""
    code = 1
    try:
        log = os.open(campaign.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)  # torch makes its pool anew after a fork
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE=str(RANKS),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(RANKS),
        )
        way = campaign.way
        run = MarkedRun(
            campaign.folder, named=way.named, width=WIDTH, background=way.background, sharded=way.sharded
        )
        if campaign.dies_at and rank == 1:
            _die_writing(campaign.dies_at)
        some = newest_whole(home(campaign.folder, way.named)) is not None
        value = run.load() if some else NOTHING
        board.put(rank, LOADED, value)
        _save_on(run, board, rank, value, last)
        code = 0
    except BaseException:  # noqa: BLE001  the campaign reads it
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _save_on(run: MarkedRun, board: Board, rank: int, value: int, last: bool) -> None:
    while True:
        value += 1
        time.sleep(0.01 * (value % 3))  # the training
        run.mark(value)
        board.put(rank, BEGUN, value)
        if last:
            run.save()
            return
        run.begin_save()
        # in the background, a save that begins has waited for the one before
        board.put(rank, RETURNED, value - 1 if run.background else value)


@contextlib.contextmanager
def _ended(ranks: list[int]) -> Iterator[None]:
    """Whatever comes, the ranks are dead and buried behind it."""
    try:
        yield
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank, 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_writing(number: int) -> None:
    """Let this process die while it writes its part of the `number`-th folder of shards from now on."""
    real = dcp.FileSystemWriter.write_data
    written = itertools.count(1)

    def write_data(writer: Any, *args: Any) -> Any:
        if next(written) == number:
            delay_s = random.Random(time.monotonic_ns()).uniform(0.0, 0.004)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return real(writer, *args)

    dcp.FileSystemWriter.write_data = write_data


def _warm_up(folder: Path, *, sharded: bool) -> None:
    """Load here what every forked process would load again."""
    folder.mkdir()
    for kind in {False, sharded}:
        run = MarkedRun(folder / str(kind), named=True, sharded=kind)
        run.mark(1)
        run.save()
        run.load()
        run.accelerator.end_training()


def main() -> int:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--kills", type=int, default=320)
    known.add_argument("--seed", type=int, default=17)
    known.add_argument("--no-background", action="store_true", help="blocking saves alone")
    known.add_argument("--sharded", action="store_true", help="runs that FSDP2 shards, too")
    words = known.parse_args()
    every = WAYS + (SHARDED if words.sharded else [])
    ways = [way for way in every if not (words.no_background and way.background)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = run_campaign(words.kills, ways, Path(folder), words.seed)
    print(
        f"kills and saves in {time.monotonic() - begun:.0f} s: {sum(counts.kills.values()) // 2}, {counts.saves}"
    )
    for name, number in sorted(counts.kills.items()):
        print(f"  {number:5} {name}")
    for name, texts in counts.found().items():
        print(f"{len(texts):7} {name}", *texts, sep="\n")
    return 1 if any(counts.found().values()) else 0


if __name__ == "__main__":
    sys.exit(main())
