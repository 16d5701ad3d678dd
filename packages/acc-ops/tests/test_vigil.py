"""A collective that takes long: who is asked when, what is logged, and when the wait ends. Time is a fake; work and answers are scripts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from acc_ops import vigil
from acc_ops.comm import CommError
from acc_ops.desk import Silence
from acc_ops.vigil import Vigil, Waiting, place_of, place_of_main_thread

ELSEWHERE = {
    "number": 6,
    "made": "6 calls, the last gather,",
    "waits": "",
    "left": "",
    "gave_up": "",
    "at": "b.py:3",
}
SAME = {**ELSEWHERE, "number": 7, "waits": "gather (call 7, a.py:1)"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(vigil, "time", fake)
    return fake


class Work:
    """Done after `seconds`, or failed with `error` then; never with None."""

    def __init__(self, clock: Clock, seconds: float | None, error: str | None = None) -> None:
        self.clock, self.error = clock, error
        self.at = None if seconds is None else clock.now + seconds
        self.slices = 0

    def is_completed(self) -> bool:
        return self.at is not None and self.clock.now >= self.at

    def wait(self, timeout: timedelta) -> None:
        self.slices += 1
        end = self.clock.now + timeout.total_seconds()
        self.clock.now = end if self.at is None else max(self.clock.now, min(end, self.at))
        if self.error is not None and self.is_completed():
            raise RuntimeError(self.error)
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")


def waiting(ask: Callable[[int], Any], told: dict[int, Any] | None = None, **changes: Any) -> Waiting:
    values = {
        "who": "rank 0",
        "number": 7,
        "call": "gather (call 7, a.py:1)",
        "others": [1, 2],
        "name": "rank {}".format,
        "ask": ask,
        "told": {} if told is None else told,
        "warn_after_s": 30.0,
    }
    return Waiting(**{**values, **changes})


def test_a_call_that_ends_says_nothing_and_asks_ever_more_rarely(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    Vigil(waiting(lambda rank: asked.append(clock.now) or SAME), Work(clock, 29)).keep()
    assert caplog.records == []
    times = sorted(set(asked))
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses == sorted(pauses)
    assert len(times) <= 6
    assert [asked.count(at) for at in times] == [2] * len(times)


def test_one_warning_names_who_is_missing_and_who_waits_too(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {1: SAME, 2: ELSEWHERE}
    Vigil(waiting(answers.__getitem__), Work(clock, 500)).keep()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "rank 0 has waited 30 s in gather (call 7, a.py:1); missing: rank 2, which has made 6 calls, the last gather, and is at b.py:3; "
        "waiting, too: rank 1"
    )


def test_the_warning_is_made_from_fresh_answers(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def ask(rank: int) -> Any:
        return {**ELSEWHERE, "at": f"b.py:{clock.now:.0f}"}

    Vigil(waiting(ask, others=[1], warn_after_s=50), Work(clock, 500)).keep()
    assert "and is at b.py:149" in caplog.text  # the vigil began at 99, after a first slice


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({**ELSEWHERE, "left": "called leave_world() at c.py:9"}, "which called leave_world() at c.py:9"),
        (Silence.ENDED, "whose process has ended"),
        (
            {**ELSEWHERE, "number": 7, "gave_up": "rank 1 waits in x, which gave up: the root"},
            "which gave up: the root",
        ),
    ],
)
def test_a_rank_that_will_not_come_ends_the_wait_within_seconds(clock: Clock, answer: Any, said: str) -> None:
    with pytest.raises(CommError) as caught:
        Vigil(waiting({1: answer, 2: SAME}.__getitem__), Work(clock, None)).keep()
    assert str(caught.value) == f"rank 0 waits in gather (call 7, a.py:1) for rank 1, {said}"
    assert clock.now <= 105


def test_a_rank_that_told_goodbye_ends_the_wait_at_once_with_its_reason(clock: Clock) -> None:
    told = {1: {"rank": 1, "number": 6, "left": "ended with KeyError: 'x'", "follows": False}}
    answers = {1: Silence.ENDED, 2: {**SAME, "gave_up": "rank 2 waits for rank 1"}}
    with pytest.raises(CommError, match=r"for rank 1, which ended with KeyError: 'x'$"):
        Vigil(waiting(answers.__getitem__, told), Work(clock, None)).keep()
    assert clock.now == 100


def test_a_rank_that_left_after_its_part_of_the_call_is_not_missed(clock: Clock) -> None:
    done = {**ELSEWHERE, "number": 7, "left": "called leave_world() at c.py:9"}
    Vigil(waiting({1: done, 2: SAME}.__getitem__), Work(clock, 60)).keep()


def test_a_rank_that_ended_after_its_part_of_the_call_is_not_missed(clock: Clock) -> None:
    Vigil(waiting({1: Silence.ENDED, 2: SAME}.__getitem__), Work(clock, 2)).keep()


def test_a_rank_that_ended_is_not_blamed_while_another_one_has_yet_to_come(clock: Clock) -> None:
    """It may have got its broadcast from the root, and what the root waits for is the one that is late."""
    for late in (ELSEWHERE, Silence.MUTE, Silence.UNKNOWN):
        Vigil(waiting({1: Silence.ENDED, 2: late}.__getitem__), Work(clock, 60)).keep()


def test_a_rank_that_told_it_had_done_its_part_before_it_ended_is_not_blamed(clock: Clock) -> None:
    told = {1: {"rank": 1, "number": 7, "left": "ended", "follows": False}}
    Vigil(waiting({1: Silence.ENDED, 2: SAME}.__getitem__, told), Work(clock, 60)).keep()


def test_a_rank_that_ended_is_blamed_when_the_last_of_the_others_has_come(clock: Clock) -> None:
    def ask(rank: int) -> Any:
        return Silence.ENDED if rank == 1 else SAME if clock.now > 120 else ELSEWHERE

    with pytest.raises(CommError, match=r"for rank 1, whose process has ended$"):
        Vigil(waiting(ask), Work(clock, None)).keep()
    assert 120 < clock.now < 170


def test_a_broken_connection_is_explained_by_the_rank_that_ends_a_moment_later(clock: Clock) -> None:
    def ask(rank: int) -> Any:
        return Silence.ENDED if rank == 2 and clock.now > 100.5 else SAME

    with pytest.raises(CommError, match=r"for rank 2, whose process has ended$") as caught:
        Vigil(waiting(ask), Work(clock, 0, "Connection closed by peer")).keep()
    assert caught.value.__cause__ is not None


def test_a_timeout_says_who_was_missing_instead_of_the_backends_words(clock: Clock) -> None:
    answers = {1: ELSEWHERE, 2: Silence.MUTE}
    with pytest.raises(CommError) as caught:
        Vigil(waiting(answers.__getitem__), Work(clock, 20, "Timed out waiting 20000ms for send")).keep()
    assert str(caught.value) == (
        "rank 0 waited 21 s in gather (call 7, a.py:1) in vain; missing: rank 1, which has made 6 calls, the last gather, and is at b.py:3; "
        "rank 2: its process is there, but does not answer"
    )


def test_what_nobody_can_explain_keeps_the_backends_words(clock: Clock) -> None:
    work = Work(clock, 0, "[pair.cc:1] op.preamble.length <= op.nbytes\nmore")
    with pytest.raises(CommError) as caught:
        Vigil(waiting(lambda rank: Silence.UNKNOWN), work).keep()
    assert str(caught.value) == (
        "rank 0 failed in gather (call 7, a.py:1): [pair.cc:1] op.preamble.length <= op.nbytes"
    )


def test_a_backend_that_refuses_to_wait_is_no_endless_loop(clock: Clock) -> None:
    class Broken(Work):
        def wait(self, timeout: timedelta) -> None:
            self.slices += 1
            raise RuntimeError("aborted")

    work = Broken(clock, None)
    with pytest.raises(CommError, match=r"failed in .*: aborted"):
        Vigil(waiting(lambda rank: Silence.UNKNOWN), work).keep()
    assert work.slices == 1


def test_a_long_list_is_cut(clock: Clock) -> None:
    with pytest.raises(CommError, match=r"for rank 1, whose process has ended and for .* and 92 more$"):
        Vigil(waiting(lambda rank: Silence.ENDED, others=range(1, 101)), Work(clock, None)).keep()


def test_a_place_is_the_users_line_and_what_it_called() -> None:
    source = "def gather(f):\n    return f()\n"
    ours: dict[str, Any] = {"__name__": "acc_ops.collectives"}
    exec(source, ours)  # a function that counts as one of this package

    def user() -> Any:
        return ours["gather"](sys._getframe), ours["gather"](lambda: place_of(sys._getframe(1)))

    _, place = user()
    assert place.function == "gather"
    assert place.file == __file__
    assert place_of(None).line == 0
    assert isinstance(place_of_main_thread(), vigil.Place)
