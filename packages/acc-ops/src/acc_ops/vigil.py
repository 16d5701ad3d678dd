"""One call that takes long: who is asked, what is said, and when the wait ends.

[Note: a wait in slices] A collective is started asynchronously and waited for in slices of a second, which costs no more than waiting at once and
harms no gloo group. A call that is over within its first slice pays for nothing else. After that a helper thread asks the other ranks at their
desks (`desk.py`) what they do: after 1, 2, 4, ... seconds, in the end every half minute. A rank that has ended or left ends the wait with a
CommError; ranks that are elsewhere are named in one warning, and in the error at the group's timeout.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

from acc_ops.comm import CommError
from acc_ops.desk import Answer, Silence

logger = logging.getLogger(__name__)
SLICE_S = 1.0
SLICE = timedelta(seconds=SLICE_S)


class Waiting(NamedTuple):
    """What is waited for, by whom, and whom one can ask."""

    who: str  # "rank 0"
    number: int  # of the call
    call: str  # "gather (call 7, train.py:31)"
    others: Sequence[int]
    name: Callable[[int], str]  # of a rank
    ask: Callable[[int], Answer | Silence]
    told: dict[int, Answer]  # what ranks that left have said themselves; may grow at any time
    warn_after_s: float


class Vigil:
    """The wait for one collective beyond its first slice."""

    def __init__(self, waiting: Waiting, work: Any) -> None:
        self._waiting = waiting
        self._work = work
        self._began_s = time.monotonic() - (0.0 if work.is_completed() else SLICE_S)
        self._round: _Round | None = None
        self._pause_s = SLICE_S / 2
        self._answers: dict[int, Answer | Silence] = {}
        self._ended_since_s: float | None = None
        self._warned = False

    def keep(self) -> None:
        """Return when the collective is done. Raises CommError, naming the ranks that were missing and why, when it failed or cannot be done."""
        while not self._work.is_completed():
            self._ask_if_due()
            self._raise_if_hopeless()
            self._warn_if_due()
            began_s = time.monotonic()
            try:
                self._work.wait(SLICE)
                return
            except RuntimeError as error:  # the slice is over, or the collective failed
                if not self._work.is_completed() and time.monotonic() - began_s < SLICE_S / 2:
                    raise self._failure(error) from error
        try:
            self._work.wait(SLICE)
        except RuntimeError as error:
            raise self._failure(error) from error

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def _ask_if_due(self) -> None:
        """Begin a round of questions when it is time for one, or for the warning; take in what the last one has learnt so far."""
        last = self._round
        if last is not None:
            self._answers.update(last.answers)
        if last is None or (last.done and (last.age_s >= self._pause_s or self._warning_needs_a_round(last))):
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._round = _Round(self._waiting)
            self._round.join(_SHORT_S)
            self._answers.update(self._round.answers)

    def _warning_needs_a_round(self, last: _Round) -> bool:
        over_s = self._waited_s - self._waiting.warn_after_s
        return not self._warned and 0 <= over_s < last.age_s

    def _warn_if_due(self) -> None:
        if self._warned or self._waited_s < self._waiting.warn_after_s or self._round is None:
            return
        if self._round.done or self._round.age_s > _ROUND_S:
            self._warned = True
            waited = f"{self._waiting.who} has waited {self._waited_s:.0f} s in {self._waiting.call}"
            logger.warning("%s%s", waited, self._standing())

    def _raise_if_hopeless(self) -> None:
        gone = self._gone()
        if not gone:
            self._ended_since_s = None
            return
        if all(self._answers.get(rank) is Silence.ENDED and rank not in self._waiting.told for rank in gone):
            if any(self._may_come(rank) for rank in self._waiting.others):
                self._ended_since_s = (
                    None  # who ended may have done its part, and the call may be waiting for this one
                )
                return
            if self._ended_since_s is None:  # it may have done its part before; then the call is over soon
                self._ended_since_s = time.monotonic()
                self._pause_s = SLICE_S
            if time.monotonic() - self._ended_since_s < _SURE_AFTER_S:
                return
        raise CommError(self._text_of_gone(gone))

    def _may_come(self, rank: int) -> bool:
        """Whether a rank that has not ended has not begun this call yet, as far as is known."""
        answer = self._answers.get(rank)
        if rank in self._waiting.told or answer is Silence.ENDED:
            return False
        return not isinstance(answer, dict) or answer["number"] < self._waiting.number

    def _failure(self, error: RuntimeError) -> CommError:
        """What to raise for what the backend raised; the ranks that caused it may take a moment to end."""
        waited_s = self._waited_s
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        timed_out = "timed out" in said.lower()  # then nobody has ended
        deadline_s = time.monotonic() + (0.0 if timed_out else _LOOK_FOR_S)
        pause_s = 0.05
        while True:
            asked = _Round(self._waiting)
            asked.join(_LOOK_FOR_S)
            self._answers = dict(asked.answers)
            gone = self._gone()
            if gone:
                return CommError(self._text_of_gone(gone))
            if time.monotonic() + pause_s > deadline_s:
                break
            time.sleep(pause_s)
            pause_s *= 2
        standing = self._standing()
        if timed_out and standing:
            return CommError(
                f"{self._waiting.who} waited {waited_s:.0f} s in {self._waiting.call} in vain{standing}"
            )
        return CommError(f"{self._waiting.who} failed in {self._waiting.call}: {said}{standing}")

    def _gone(self) -> dict[int, str]:
        """Ranks that will not do their part of this call, with the reason; only those that gave up for another's sake when there are no others."""
        causes: dict[int, str] = {}
        consequences: dict[int, str] = {}
        for rank in self._waiting.others:
            answer: Any = self._answers.get(rank)
            told = self._waiting.told.get(rank)
            if told is not None:
                answer = told
            if answer is Silence.ENDED:
                causes[rank] = "whose process has ended"
            elif not isinstance(answer, dict):
                continue
            elif answer.get("left") and answer["number"] < self._waiting.number:
                (consequences if answer.get("follows") else causes)[rank] = f"which {answer['left']}"
            elif answer.get("gave_up"):
                consequences[rank] = f"{_GAVE_UP}{answer['gave_up'].rpartition(_GAVE_UP)[2]}"
        return causes or consequences

    def _text_of_gone(self, gone: dict[int, str]) -> str:
        named = [f"{self._waiting.name(rank)}, {why}" for rank, why in sorted(gone.items())]
        return f"{self._waiting.who} waits in {self._waiting.call} for {_listed(named, ' and for ')}"

    def _standing(self) -> str:
        """Who is missing and what each of them does, who waits as well; empty when nobody could be asked."""
        here, missing = [], []
        for rank in sorted(self._waiting.others):
            name = self._waiting.name(rank)
            answer = self._answers.get(rank)
            if isinstance(answer, dict):
                if answer["waits"] and answer["number"] == self._waiting.number:
                    elsewhere = "" if answer["waits"] == self._waiting.call else f" in {answer['waits']}"
                    here.append(f"{name}{elsewhere}")
                elif answer["waits"]:
                    missing.append(f"{name}, which waits in {answer['waits']}")
                else:
                    missing.append(f"{name}, which has made {answer['made']} and is at {answer['at']}")
            elif answer is not None and answer is not Silence.UNKNOWN:
                missing.append(f"{name}: {answer.value}")
        text = f"; missing: {_listed(missing, '; ')}" if missing else ""
        return text + (f"; waiting, too: {_listed(here)}" if here else "")


class Place(NamedTuple):
    """Where a thread is in the user's code."""

    file: str
    line: int
    function: (
        str  # of ours or torch's that the user's code called; empty: the thread is in the user's code itself
    )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def place_of(frame: FrameType | None) -> Place:
    """The innermost line of a stack that belongs neither to these packages nor to torch or Python's own libraries."""
    function, innermost = "", frame
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        function, frame = frame.f_code.co_name, frame.f_back
    frame = frame or innermost
    if frame is None:
        return Place("?", 0, "")
    return Place(frame.f_code.co_filename, frame.f_lineno, function)


def place_of_main_thread() -> Place:
    """Where this process's main thread is; may be called in any thread."""
    return place_of(sys._current_frames().get(threading.main_thread().ident or 0))


_NOT_THE_USERS = frozenset(
    {
        "acc_ops",
        "acc_hooks",
        "acc_bigmodel",
        "acc_plugins",
        "acc_trainer",
        "acc_compat",
        "accelerate",
        "torch",
    }
) | (frozenset(getattr(sys, "stdlib_module_names", ())) - {"__main__"})
_LONGEST_PAUSE_S = 30.0  # between two rounds of questions
_ROUND_S = 5.0  # how long the warning waits for the answers of many
_SHORT_S = 0.2  # a round that nobody keeps waiting is over by then
_SURE_AFTER_S = 3.0  # after which a call that does not end will not
_LOOK_FOR_S = 2.5  # how long to ask who ended after a connection broke
_MOST_NAMED = 8
_GAVE_UP = "which gave up: "


class _Round:
    """One round of questions to the other ranks, asked from a thread of its own: a call that ends meanwhile is not held up."""

    def __init__(self, waiting: Waiting) -> None:
        self.answers: dict[int, Answer | Silence] = {}
        self._waiting = waiting
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._ask_all, name="acc asks other ranks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # Python is ending and starts no threads any more
            self._ask_all()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_s

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _ask_all(self) -> None:
        for rank in self._waiting.others:
            self.answers[rank] = self._waiting.ask(rank)


def _listed(items: Iterable[str], comma: str = ", ") -> str:
    named = list(items)
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return comma.join(named[:_MOST_NAMED]) + more
