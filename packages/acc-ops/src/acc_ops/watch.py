"""What a rank knows of the others of its process group, and what it says to those that wait for it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch.distributed as dist

from acc_ops.comm import CommError
from acc_ops.desk import Address, Answer, Silence, ask, close_desk, forget_address, open_desk
from acc_ops.forks import is_forked_from_a_rank
from acc_ops.option_fields import option
from acc_ops.options import from_env
from acc_ops.ranks import RanksError, read_ranks
from acc_ops.vigil import SLICE, Place, Vigil, Waiting, place_of, place_of_main_thread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How ranks wait for each other."""

    warn_after_s: float = option(
        30.0,
        env="ACC_WARN_AFTER",
        help="seconds that a rank waits for others before it says which are missing and what they do",
    )

    def __post_init__(self) -> None:
        if not (isfinite(self.warn_after_s) and self.warn_after_s > 0):
            raise ValueError(f"warn_after_s must be a number of seconds above 0, got {self.warn_after_s!r}")


class Peers(NamedTuple):
    """Which ranks of which group speak, and how this process finds the others."""

    rank: int
    size: int
    names: Sequence[str]  # what to call each rank
    store: Callable[[], Any]  # the group's store while there is one
    alive: Callable[[], bool]  # whether the group has not been destroyed
    abandon: Callable[[], None]  # never wait for what the group has begun
    generation: str = ""  # which of the groups with the same store this is; the ranks count alike
    one_machine: bool = False  # all of them are on this one


class Watch:
    """One rank among the others of one process group. In the order of the calls: `wait` again and again, then `leave`."""

    def __init__(self, peers: Peers, options: WatchOptions) -> None:
        self.options = options
        self._peers = peers
        self._number = 0  # calls begun
        self._name = ""  # of the last one
        self._caller = threading.get_ident()  # the thread that began it
        self._busy = False  # in a call
        self._waits = ""  # that call, when it has outlasted its first slice
        self._left = ""  # why this rank makes no more calls
        self._gave_up = (0, "")  # a call that failed, and its error
        self._told: dict[int, Answer] = {}  # what ranks that leave have said themselves
        self._address: Address | None = None
        self._addresses: dict[int, Address] = {}
        self._reached: set[int] = set()
        self._looked = False  # for the others' addresses, after the first call
        self._store_has_gone = False
        self._publish()

    def wait(self, work: Any, name: str) -> None:
        """Return when `work`, a collective that is called `name`, is done.

        Raises CommError naming the ranks that ended, left, gave up, or did not come within the group's timeout.
        """
        self._number += 1
        self._caller = threading.get_ident()
        self._name = name
        self._busy = True
        try:
            work.wait(SLICE)
            over = True
        except RuntimeError:  # the slice is over, or the collective failed
            over = False
        except KeyboardInterrupt:
            self._busy = False
            self._peers.abandon()
            raise
        if not over:
            self._wait_on(work)
        self._busy = False
        if not self._looked:  # while the store's keeper is there; whoever made this call has an address
            self._looked = True
            self._find(self._others())

    def leave(self, why: str) -> None:
        """Say to whoever asks from now on that this rank `why`, such as "called leave_world()"."""
        self._left = self._left or why

    def tell_others(self, why: str, *, follows: bool, deadline_s: float) -> None:
        """Leave, and tell the others so, as far as they can be reached by then; `follows`: only because of another rank's error."""
        self.leave(why)
        told = {"rank": self._peers.rank, "number": self._number, "left": self._left, "follows": follows}
        for rank in self._others():
            left_s = deadline_s - time.monotonic()
            if rank in self._addresses and left_s > 0:
                ask(self._addresses[rank], told, min(left_s, _GOODBYE_S / 4))

    def close(self) -> None:
        """Answer nobody any more; the group is gone, and another one has been made."""
        if self._address is not None:
            forget_address(self._address)

    def respond(self, question: Answer) -> Answer:
        """What this process says to a rank that asks, or that tells it goodbye."""
        if "left" in question:
            self._told[int(question["rank"])] = question
            return {}
        place = place_of_main_thread()
        last = f", the last {self._name}," if self._number else ""
        return {
            "number": self._number,
            "made": f"{self._number} call{'' if self._number == 1 else 's'}{last}",
            "waits": self._waits or (self._call(place) if self._busy else ""),
            "left": self._left or self._silently_left(),
            "gave_up": self._gave_up[1] if self._gave_up[0] == self._number else "",
            "at": f"{place} in {place.function}" if place.function else f"{place}",
        }

    def _silently_left(self) -> str:
        if not self._peers.alive():
            return "destroyed its process group"
        main = threading.main_thread()
        if self._caller == main.ident and not main.is_alive():  # Python waits for other threads
            return f"ended its main thread{_last_error()}"
        return ""

    def _others(self) -> list[int]:
        """The other ranks, the next ones first, so that in a large world not all ask the same."""
        size = self._peers.size
        return [(self._peers.rank + step) % size for step in range(1, min(size, _MOST_ASKED + 1))]

    def _publish(self) -> None:
        store = self._peers.store()
        if store is None:
            return
        keeper = store
        while hasattr(keeper, "underlying_store"):
            keeper = keeper.underlying_store
        host = getattr(keeper, "host", None)
        peer = None if host is None else (host, keeper.port)
        self._address = open_desk(self.respond, peer, one_machine=self._peers.one_machine)
        if self._address is not None:
            try:
                said = f"{self._peers.generation} {self._address.to_text()}"
                store.set(f"{_KEY}{self._peers.rank}", said)
            except RuntimeError:  # the store has gone: the first call will say why
                logger.debug("the group's store did not take this rank's address", exc_info=True)

    def _find(self, ranks: Sequence[int]) -> None:
        """Read the addresses of those `ranks` that have one.

        A store that outlives its groups may still have a rank's address in the last one. Whoever was in a call of this group
        has said its new one; before the first call only an address of the same generation is taken.
        """
        store = None if self._store_has_gone else self._peers.store()
        if store is None or not ranks:
            return
        keys = [f"{_KEY}{rank}" for rank in ranks]
        try:
            if store.check(keys):
                for rank, said in zip(ranks, store.multi_get(keys), strict=True):
                    generation, _, text = said.decode().partition(" ")
                    if self._looked or generation == self._peers.generation:
                        self._addresses[rank] = Address.from_text(text)
            elif len(ranks) > 1:
                for rank in ranks:
                    self._find([rank])
        except RuntimeError:  # it is not asked again: torch would print a warning each time
            self._store_has_gone = True
            logger.debug("the group's store does not answer", exc_info=True)

    def _ask(self, rank: int) -> Answer | Silence:
        if rank not in self._addresses:
            self._find([rank])
        if rank not in self._addresses:
            return Silence.UNKNOWN
        answer = ask(self._addresses[rank], {}, trusted=rank in self._reached)
        if isinstance(answer, dict):
            self._reached.add(rank)
        return answer

    def _wait_on(self, work: Any) -> None:
        """Wait beyond the first slice, or find out why the collective failed."""
        self._waits = self._call(place_of(sys._getframe()))
        waiting = Waiting(
            who=self._peers.names[self._peers.rank],
            number=self._number,
            call=self._waits,
            others=self._others(),
            name=self._peers.names.__getitem__,
            ask=self._ask,
            told=self._told,
            warn_after_s=self.options.warn_after_s,
        )
        try:
            Vigil(waiting, work).keep()
        except BaseException as error:
            text = str(error) if isinstance(error, CommError) else type(error).__name__
            self._gave_up = (self._number, text)
            if not work.is_completed():
                self._peers.abandon()
            raise
        finally:
            self._busy, self._waits = False, ""

    def _call(self, place: Place) -> str:
        return f"{place.function or self._name} (call {self._number}, {place})"


def watch_of(group: dist.ProcessGroup | None, warn_after_s: float | None = None) -> Watch:
    """This process's watch over a process group (None: the default one), the same for all who speak in it.

    `warn_after_s` defaults to the environment's ACC_WARN_AFTER, or 30 seconds.
    """
    key: Any = dist.group.WORLD if group is None else group
    watch = _watches.get(key)
    if watch is None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        outside = dist.get_process_group_ranks(key)
        names = [
            f"rank {r}" if r == outer else f"rank {r} (global {outer})" for r, outer in enumerate(outside)
        ]
        held = weakref.ref(key)
        peers = Peers(
            rank=rank,
            size=size,
            names=names,
            store=lambda: None if is_forked_from_a_rank() else _store_of(held()),
            alive=lambda: _is_alive(held()),
            abandon=lambda: _keep_for_ever(held()),
            generation=_next_generation(key),
            one_machine=_is_on_one_machine(),
        )
        watch = _watches[key] = Watch(peers, from_env(WatchOptions))
        _last.watches.append(watch)
    if warn_after_s is not None:
        watch.options = WatchOptions(warn_after_s=warn_after_s)
    return watch


def leave_all(why: str) -> None:
    """Say to whoever asks that this process has left all its groups: it `why`."""
    for watch in _last.watches:
        watch.leave(why)


def say_goodbye(why: str, *, follows: bool = False) -> None:
    """Tell the ranks of every group of this process that it makes no more calls because it `why`, such as "raised KeyError: 3"."""
    deadline_s = time.monotonic() + _GOODBYE_S
    for watch in _last.watches:
        watch.tell_others(why, follows=follows, deadline_s=deadline_s)


_KEY = "acc_ops/desk/"  # in the store of the group, with the rank
_MOST_ASKED = 64  # ranks, by one that waits or leaves
_GOODBYE_S = 1.0
_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


class _Generation:
    """A default process group and those made beside it. Who waits in them is answered, also when they are gone, until the next one is made."""

    def __init__(self, number: int, default: Callable[[], Any]) -> None:
        self.number = number  # counts default groups that this process watched
        self.default = default
        self.named: Counter[str] = (
            Counter()
        )  # groups by their name, which torch gives a second time after the first has gone
        self.watches: list[Watch] = []


_last = _Generation(0, lambda: None)


def _next_generation(group: Any) -> str:
    global _last
    if _last.default() is not dist.group.WORLD:
        before, _last = _last, _Generation(_last.number + 1, weakref.ref(dist.group.WORLD))
        for watch in before.watches:
            watch.close()
    _last.named[group.group_name] += 1
    return f"{_last.number}.{_last.named[group.group_name]}"


def _is_on_one_machine() -> bool:
    """Whether a launcher said so for all ranks there are."""
    try:
        said = read_ranks()
    except RanksError:
        return False
    return said.size == said.local_size == dist.get_world_size()


def _store_of(group: Any) -> Any:
    """The store through which the group's ranks found each other. torch has no public name for it before 2.10, and may lose the private one."""
    get = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    try:
        return None if get is None or group is None else get(group)
    except (KeyError, ValueError, RuntimeError):  # the group has been destroyed
        return None


def _is_alive(group: Any) -> bool:
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


def _keep_for_ever(group: Any) -> None:
    """Hold a group whose collective will not end: taking it apart, in leave_world() or at exit, would wait for that until the timeout.

    A reference that Python lets go of at exit would not do; that of a daemon thread's frame is never taken back.
    """

    def keep(held: Any, forever: threading.Event) -> None:  # noqa: ARG001 - to be held is all it is for
        forever.wait()

    threading.Thread(
        target=keep, args=(group, threading.Event()), name="acc keeps a group", daemon=True
    ).start()


def _forget() -> None:
    """In a forked child, which is no rank of anything."""
    global _watches, _last
    _watches, _last = weakref.WeakKeyDictionary(), _Generation(0, lambda: None)


def _at_exit() -> None:
    follows = isinstance(getattr(sys, "last_value", None), CommError)
    say_goodbye(
        f"ended{_last_error()}", follows=follows
    )  # with the number of calls: others may still be in them
    close_desk()


def _last_error() -> str:
    """What ended the script, as " with KeyError: 'lost'"; it was printed a moment ago."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    return f" with {type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
