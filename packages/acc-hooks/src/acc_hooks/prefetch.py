"""While one layer computes, a thread fetches the weights of the next ones.

[Note: who does what]
    the thread of the forward   `take`: what was fetched for this layer, if it was; else the layer reads its map itself.
                                `look_ahead`: the layer has its weights, the ones after it may be fetched now
    our thread                  reads the map, in the order of the jobs; copies to an accelerator, if the layer runs on one

One forward at a time is served, the first that asks; other threads read for themselves. Everything that was fetched and not
used is dropped at the end of the outermost forward, and when a weight is written to: nothing outlives what it was read
from. The map is not read by two threads at once because of us, nor between forwards.

Fetching ahead pays only where reading takes time. A map can say whether it does by a method `is_at_hand(name)`: reading
would take no time. A dict is at hand. What other maps take is measured.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from acc_hooks.fetching import Fetched, Job, Wanted
from acc_hooks.inputs import at_end_of_forward
from acc_hooks.order import LearntOrder
from acc_hooks.prefixed import home_of, innermost, is_at_hand
from acc_hooks.staging import SideStream, side_stream

logger = logging.getLogger(__name__)

LAYERS_AHEAD = 2
BYTES_AHEAD = 4 << 30
WORTH_A_THREAD_S = 0.0005  # handing a layer over to a thread and back takes a tenth of it
_IDLE_S = 5.0
_MOST_FAILURES = 2  # one may be bad luck


class Layer(Protocol):
    """Who can be fetched for."""

    def _wants_next(self) -> Wanted | None:
        """What the next forward will read; None for nothing, and while it is there."""


class Prefetcher:
    """Fetches for the layers of one model: `layers_ahead` (0: never) of them, and at most `bytes_ahead`.

    A layer that runs does 1 `take` 2 its own reading, in `reading()` 3 `look_ahead`.
    """

    _pid: int
    # a signal handler, or the map itself, may use the model while the thread holds them
    _reading: AbstractContextManager[Any]  # of the map
    _lock: AbstractContextManager[Any]  # of everything below
    _layers: dict[int, weakref.ref[Layer]]
    _order: LearntOrder
    _forward: int | None  # the thread whose forward is served
    _jobs: dict[int, Job]  # what is fetched or about to be, by layer
    _at_hand: dict[int, tuple[Mapping[str, Tensor], torch.device]]  # layers, until they are slow
    _seconds: dict[int, float]  # what reading a layer took the last time
    _last_seconds: float
    _began: float | None  # the layer that reads now
    _failure: tuple[str, BaseException] | None  # of our thread; the layer has not tried yet
    _failures: int  # of our thread alone, in a row
    _has_complained: bool  # of the map's `is_at_hand`
    _side_streams: dict[torch.device, SideStream | None]
    _thread: threading.Thread | None
    _queue: queue.SimpleQueue[Job | None]  # to the thread

    def __init__(
        self,
        layers_ahead: int = LAYERS_AHEAD,
        bytes_ahead: int = BYTES_AHEAD,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(layers_ahead, bool) or not isinstance(layers_ahead, int) or layers_ahead < 0:
            raise ValueError(
                f"prefetch is how many layers are fetched ahead, 0 for none; got {layers_ahead!r}"
            )
        self._layers_ahead = layers_ahead
        self._bytes_ahead = bytes_ahead
        self._clock = clock
        self._start_anew()

    def join(self, layer: Layer, number: int | None = None) -> int:
        """Fetch for this layer, which is held weakly, from now on; returns its number. `number`: it had one, before a copy."""
        if number is None:
            number = self._order.layers
        self._layers[number] = weakref.ref(layer)
        self._order.layers = max(self._order.layers, number + 1)
        return number

    def take(
        self, number: int, weights_map: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Fetched]:
        """What was fetched for the layer that runs now, by name; what is missing it must read."""
        if not self._layers_ahead:
            return {}
        self._look_where_we_are()
        with self._lock:
            if not self._is_served():
                return {}
            self._order.came(number)
            known = self._at_hand.get(number)
            if known is not None and (known[0] is not weights_map or known[1] != device):
                del self._at_hand[number]
            job = self._jobs.pop(number, None)
            if self._jobs:
                nearest = self._order.next_layers(self._layers_ahead)
                for other in [other for other in self._jobs if other not in nearest]:
                    self._jobs.pop(other).drop()
        self._began = self._clock()
        if job is None or job.claim():
            return {}
        fetched = job.result(weights_map, device)
        self._began = None  # the layer's own time says nothing about its map
        if job.error is not None:
            self._failure = (type(innermost(weights_map)).__name__, job.error)
        elif job.seconds is not None:
            self._failures = 0
        if job.seconds is not None:
            self._note(number, job.seconds)
        return fetched

    def look_ahead(self, number: int) -> None:
        """The layer that runs now has its weights: fetch the next ones."""
        if not self._layers_ahead:
            return
        self._look_where_we_are()
        with self._lock:
            if self._forward != threading.get_ident():
                return
            if self._began is not None:
                self._note(number, self._clock() - self._began)
                self._began = None
            if self._failure is not None:  # and the layer itself could read
                failure, self._failure = self._failure, None
                self._failures += 1
                if self._failures == _MOST_FAILURES:
                    self._give_up(*failure)
                    return
            for next_number in self._order.next_layers(self._layers_ahead):
                if next_number not in self._jobs and next_number not in self._at_hand:
                    self._fetch(next_number)

    def reading(self) -> AbstractContextManager[Any]:
        """Around whatever reads the map, so that no two threads do."""
        self._look_where_we_are()
        return self._reading

    def forget(self) -> None:
        """A weight changes: drop what was fetched; nothing is being read when this returns."""
        self._look_where_we_are()
        with self._lock:
            while self._jobs:
                self._jobs.popitem()[1].drop()
        with self._reading:  # the thread looks whether its job was dropped before each tensor
            pass

    def _look_where_we_are(self) -> None:
        if self._pid != os.getpid():  # a forked child has no thread, and perhaps locks that nobody opens
            self._start_anew(self._layers)

    def _is_served(self) -> bool:
        me = threading.get_ident()
        if self._forward is None and at_end_of_forward(self._end):
            self._forward = me
        return self._forward == me

    def _end(self) -> None:
        try:
            self.forget()
        finally:
            with self._lock:
                self._order.end()
                self._forward = self._began = self._failure = None

    def _fetch(self, number: int) -> None:
        known = self._layers.get(number)
        layer = None if known is None else known()
        wanted = None if layer is None else layer._wants_next()
        if wanted is None:
            return
        if not self._is_worth_a_thread(number, wanted):
            self._at_hand[number] = (wanted.weights_map, wanted.device)
            return
        if sum(job.bytes for job in self._jobs.values()) + sum(wanted.nbytes.values()) > self._bytes_ahead:
            return
        if self._thread is None and not self._start_thread():
            return
        self._jobs[number] = job = Job(wanted, self._reading, self._clock, self._side_stream(wanted.device))
        self._queue.put(job)

    def _start_thread(self) -> bool:
        self._queue = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._queue, weakref.ref(self)), name="acc-prefetch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # there can be no more threads, or the interpreter ends
            return False
        weakref.finalize(self, self._queue.put, None).atexit = False
        self._thread = thread
        return True

    def _is_worth_a_thread(self, number: int, wanted: Wanted) -> bool:
        is_copied = self._side_stream(wanted.device) is not None
        answers = {self._is_here(wanted, name, is_copied) for name in wanted.nbytes}
        if answers <= {True}:
            return False
        if False in answers or is_copied:
            return True
        return self._seconds.get(number, self._last_seconds) >= WORTH_A_THREAD_S

    def _is_here(self, wanted: Wanted, name: str, is_copied: bool) -> bool | None:
        """Whether nothing would be won by fetching this tensor ahead; None if its map does not say."""
        home, key = home_of(wanted.weights_map, name)
        try:
            answer = is_at_hand(home, key)
            return answer and (not is_copied or home[key].device == wanted.device)
        except KeyError:
            return True  # the layer will say so
        except Exception as error:  # noqa: BLE001 - the layer that runs now is not the one to fail
            if not self._has_complained:
                self._has_complained = True
                logger.warning(
                    "is_at_hand(%r) of a %s raised %s: %s; it is measured instead what reading takes",
                    key,
                    type(home).__name__,
                    type(error).__name__,
                    error,
                )
            return None

    def _note(self, number: int, seconds: float) -> None:
        if seconds >= WORTH_A_THREAD_S:
            self._at_hand.pop(number, None)
        self._seconds[number] = self._last_seconds = seconds

    def _side_stream(self, device: torch.device) -> SideStream | None:
        if device not in self._side_streams:
            self._side_streams[device] = side_stream(device)
        return self._side_streams[device]

    def _give_up(self, kind: str, error: BaseException) -> None:
        self._layers_ahead = 0
        logger.warning(
            "weights could not be fetched from a %s by another thread, %d times in a row, though the model's thread could "
            "read them at once (%s: %s); they are not fetched ahead any more, prefetch=0 says so from the start",
            kind,
            _MOST_FAILURES,
            type(error).__name__,
            error,
        )

    def _retire(self) -> bool:
        """Whether the thread may end, as nothing waits for it."""
        with self._lock:
            if self._queue.empty():
                self._thread = None
            return self._thread is None

    def _start_anew(self, layers: Mapping[int, weakref.ref[Layer]] | None = None) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        self._layers = dict(layers or {})
        self._order = LearntOrder()
        self._order.layers = max(self._layers, default=-1) + 1
        self._forward, self._jobs = None, {}
        self._at_hand, self._seconds, self._last_seconds = {}, {}, 0.0
        self._began, self._failure = None, None
        self._failures, self._has_complained = 0, False
        self._side_streams = {}
        self._thread, self._queue = None, queue.SimpleQueue()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_layers_ahead", "_bytes_ahead", "_clock")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_anew()


def _work(jobs: queue.SimpleQueue[Job | None], owner: weakref.ref[Prefetcher]) -> None:
    """Our thread. It keeps the prefetcher alive for no longer than a look, and a job's weights until they are read."""
    while True:
        try:
            job = jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            prefetcher = owner()
            if prefetcher is None or prefetcher._retire():
                return
            del prefetcher
            continue
        if job is None:  # the prefetcher is gone
            return
        job.run()
        del job
