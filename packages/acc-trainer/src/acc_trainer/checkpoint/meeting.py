"""Ranks that announce themselves before they speak: a rank that does not come is an error with its number, not a hang.

[Note: why not a collective] A rank that waits in a collective for one that is elsewhere cannot give up: its message is on the way,
and would meet the other's next, different one. So the ranks first count themselves in the store through which they found each
other, which no collective touches. Only when all have come do they speak. Ranks that are threads have no store and need none:
their `Comm` bounds every wait and compares the calls.

[Note: lines that lead to a call] A call that a rank may make alone (`led`) says nothing of who else will make it, and a folder's name does not tell
either: the same one is written many times, and each rank may have one of its own (a temporary folder). What the ranks share is the script. So two of
them make the same call when the same lines led to it, from the top of the script through all functions, and it is for each of them the n-th by
those lines. A clock, such as the number of collectives or steps, would not do: a lone call and one of all may follow each other
without any, `main_process_first` shifts the one and ranks with unequal numbers of batches the other. What lines cannot tell: calls that
one and the same way through the script makes on the leader alone at one time and on all at another (`if is_main or last_epoch:`). Then a rank may
take an earlier outcome for that of this call. Ranks that call by different lines (`if is_main: save() else: save()`) do not find each other: each is told so and goes on.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from acc_ops.callers import outside_caller, warn_caller
from acc_ops.comm import Comm, Meeting, ThreadComm, TorchComm
from acc_ops.world import World

from .layout import CheckpointError

SAY_AFTER_S = 10.0
MOMENT_S = 1.0
WAIT_S = 60.0
RANK_0_S = 1800.0  # as long as torch's own collectives wait
_GAVE_UP = 1 << 40  # added to a count by the rank that waits no longer
_AS_LONG_AS_FILES_TAKE = timedelta(days=7)  # a rank that died is noticed at once

_NAMES: WeakKeyDictionary[Comm, str] = WeakKeyDictionary()  # of the worlds made by `apart`
_STORES: WeakKeyDictionary[Any, dist.HashStore] = WeakKeyDictionary()  # of ranks that are threads
_MEETINGS: WeakValueDictionary[str, Meeting] = WeakValueDictionary()


def meet(world: World, call: str, wait_s: float | None = None, *, takes_wait_s: bool = True) -> None:
    """Return when every rank makes `call` (`save_state`); CheckpointError, naming them, for ranks that do not come.

    Rank 0 waits `wait_s` seconds (a minute by default) for the others. The others wait for rank 0 alone, and half an hour:
    it may be evaluating by itself. Who waits says so on stderr after ten seconds. ValueError for a `wait_s` that is no time. `takes_wait_s`: so does
    the call of the script.
    """
    if wait_s is not None and not (isinstance(wait_s, (int, float)) and wait_s >= 0):
        raise ValueError(f"{call}: wait_s must be a number of seconds of at least 0, got {wait_s!r}")
    store = store_of(world)
    if store is None:
        return
    mine = _key(world, call, world.rank)
    count = store.add(mine, 1)
    awaited = list(range(1, world.size)) if world.is_main else [0]
    limit_s = WAIT_S if wait_s is None else wait_s
    if not world.is_main:
        limit_s = max(limit_s, RANK_0_S)

    def absent() -> list[int]:
        return [rank for rank in awaited if store.add(_key(world, call, rank), 0) < count]

    def say(ranks: list[int]) -> None:
        text = f"acc: rank {world.rank} waits in {call} for {_named(ranks)}; every rank must call {call}"
        print(text, file=sys.stderr, flush=True)

    late = wait_until_none(absent, say, SAY_AFTER_S, limit_s)
    if late:
        store.add(mine, -1)
        longer = f", or give slow ranks more time: {call}(..., wait_s={10 * limit_s:g})"
        more_time = longer if takes_wait_s else ""
        raise CheckpointError(
            f"{call} must be called on every rank; {_named(late)} did not come within {limit_s:g} s: drop the "
            f"`if is_main_process` (or other condition) around it{more_time}"
        )


def led(world: World, call: str, about: str, leader: int, work: Callable[[], None]) -> str:
    """`work()` on the rank `leader`, which waits for nobody and may be the only one that calls; the others return when it has done that work.

    Returns what the leader is `about`, which the others may say in other words. What fails there raises there, and as CheckpointError on the ranks that
    wait for it; so does a leader that does not end within half an hour. Where it does not begin within a minute (see the note on lines that lead
    to a call), the others go on with a warning: it may be busy elsewhere, or come by other lines. Without a store (XLA) they return at once.
    """
    store = _notes_of(world)
    if store is None:
        if world.rank == leader:
            work()
        return about
    lines, place = _lines_to(sys._getframe(1))
    key = f"{_prefix(world)}/{call}/{leader}/{lines}"
    number = store.add(f"{key}/calls/{world.rank}", 1)
    begun, ended = f"{key}/{number}/begun", f"{key}/{number}/ended"
    if world.rank == leader:
        store.set(begun, about)
        told = ""
        try:
            work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
            raise
        finally:
            store.set(ended, f"-{told}")  # a store knows no empty text
        return about
    waits = f"rank {world.rank} waits in {call} at {place} ({about}) for rank {leader}, which writes, to"
    done = _note(store, begun, f"{waits} come there", WAIT_S)
    if done is None:
        warn_caller(
            f"{call} at {place} ({about}): rank {leader}, which writes, did not come there within {WAIT_S:g} s of rank {world.rank}, which goes on and "
            "does not know whether it has written. Let it call, too, by the same lines of the script; where it may come later than that, call "
            "wait_for_everyone() before"
        )
        return about
    outcome = _note(store, ended, f"{waits} end", RANK_0_S)
    if outcome is None:
        raise CheckpointError(
            f"{call}: rank {leader}, which writes, did not end within {RANK_0_S:g} s ({done})"
        )
    if told := outcome[1:]:
        raise CheckpointError(f"rank {leader} failed in {call} ({done}): {told}")
    return done


def leave_block(world: World, complain: Callable[[], None] | None = None) -> bool:
    """Count this rank out of a block that all ranks run; False when the ranks will not come together any more.

    With `complain` (this rank has failed) it waits, at most a minute, until the others have left the block too, and
    complains when that takes more than a moment. Without, the caller waits in its next collective.
    """
    store = store_of(world)
    if store is None:
        return True
    key = f"{_prefix(world)}/left/{store.add(_key(world, 'block', world.rank), 1)}"
    left: int = store.add(key, 1)
    if complain is None or left >= _GAVE_UP:
        return left < _GAVE_UP

    def absent() -> list[int]:
        missing = world.size - store.add(key, 0)
        return [missing] if missing > 0 else []

    if wait_until_none(absent, lambda _: complain(), MOMENT_S, WAIT_S):
        left = store.add(key, _GAVE_UP) - _GAVE_UP  # the last one may have come at this very moment
    else:
        left = store.add(key, 0)
    return left == world.size


def wait_until_none(
    absent: Callable[[], list[int]],
    say: Callable[[list[int]], None],
    say_after_s: float,
    limit_s: float,
) -> list[int]:
    """Ask `absent` until it is empty or `limit_s` seconds are over; what it said last. `say` is called once, after `say_after_s`."""
    begun = time.monotonic()
    pause_s, said = 0.0005, False
    while missing := absent():
        waited = time.monotonic() - begun
        if waited >= limit_s:
            return missing
        if not said and waited >= say_after_s:
            said = True
            say(missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return []


def _lines_to(frame: FrameType) -> tuple[str, str]:
    """A digest of the lines that lead from the top of the script to `frame`, and the innermost that is not ours, as file:line."""
    lines = []  # without folders, which differ between machines
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        lines.append(f"{os.path.basename(code.co_filename)}:{at.f_lineno} {code.co_name}")
        if code.co_name == "<module>" and at.f_globals.get("__name__") == "__main__":
            break  # what runs the script, such as a profiler, may be there on one rank alone
        at = at.f_back
    caller = outside_caller(frame)
    return (
        hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        f"{caller.f_code.co_filename}:{caller.f_lineno}",
    )


def _note(store: Any, key: str, waits: str, limit_s: float) -> str | None:
    """The text that another rank sets for `key`, or None when it has not come within `limit_s` seconds; who waits long `waits` aloud."""

    def absent() -> list[int]:
        return [] if store.check([key]) else [0]

    def say(_: list[int]) -> None:
        print(f"acc: {waits}", file=sys.stderr, flush=True)

    if wait_until_none(absent, say, SAY_AFTER_S, limit_s):
        return None
    text: str = store.get(key).decode()
    return text


def _notes_of(world: World) -> Any | None:
    """A store that all ranks of the world share, those that are threads too; None where there is none."""
    if isinstance(world.comm, ThreadComm):
        return _STORES.setdefault(world.comm.meeting, dist.HashStore())
    return store_of(world)


def store_of(world: World) -> Any | None:
    """The store of the world's process group; None for ranks that need none (a single one, threads)."""
    if world.size == 1 or not isinstance(world.comm, TorchComm):
        return None
    return dist.distributed_c10d._get_default_store()  # torch has no public way to it


def apart(world: World) -> World:
    """The same ranks with a channel of their own, through which threads beside the training speak to each other. Every rank calls it."""
    if world.size == 1:
        return world
    name = world.comm.broadcast_object(uuid.uuid4().hex)
    comm: Comm
    if isinstance(world.comm, TorchComm):
        ranks = dist.get_process_group_ranks(world.comm.group)
        comm = TorchComm(dist.new_group(ranks, timeout=_AS_LONG_AS_FILES_TAKE, backend="gloo"))
    else:
        mine = _MEETINGS.setdefault(name, Meeting(world.size))
        comm = ThreadComm(mine, world.rank)
    _NAMES[comm] = name
    return replace(world, comm=comm)


def _prefix(world: World) -> str:
    if world.comm in _NAMES:
        return f"acc_trainer/checkpoint/{_NAMES[world.comm]}"
    group = getattr(world.comm, "group", None)
    ranks = "" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))
    return f"acc_trainer/checkpoint/{ranks}"


def _key(world: World, call: str, rank: int) -> str:
    return f"{_prefix(world)}/{call}/{rank}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
