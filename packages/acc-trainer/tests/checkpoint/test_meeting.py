"""Ranks that do not come, or fail while others wait for them, end in an error with a name and not in a hang."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from acc_trainer.checkpoint import meeting
from acc_trainer.checkpoint.layout import CheckpointError
from acc_trainer.checkpoint.meeting import leave_block, led, meet
from acc_trainer.checkpoint.together import together


@pytest.fixture
def ranks(monkeypatch):
    """Run `fn(world)` on ranks that share a store, as processes do; what each returned or raised."""
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "store_of", lambda world: store)

    def run(size, fn):
        results = [None] * size

        def one(rank):
            world = SimpleNamespace(
                rank=rank, size=size, is_main=rank == 0, comm=_NoComm(), is_local_main=rank == 0
            )
            try:
                results[rank] = fn(world)
            except Exception as error:  # noqa: BLE001  handed to the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


@pytest.fixture
def clock(monkeypatch):
    """A clock of its own for each rank, which shows only what that rank has slept, so no test depends on how busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)
    for name, seconds in (("SAY_AFTER_S", 0.1), ("MOMENT_S", 0.1), ("WAIT_S", 0.5)):
        monkeypatch.setattr(meeting, name, seconds)
    return clock


class Clock(threading.local):
    """What `meeting` uses of `time`; `on_sleep(now)` is called after each sleep."""

    now = 0.0
    on_sleep = staticmethod(lambda now: None)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        time.sleep(0.001)  # the other ranks get their turn
        self.now += seconds
        self.on_sleep(self.now)


class _NoComm:
    """Collectives that work only when everybody has come would hang here."""

    def all_gather_object(self, obj):
        raise RuntimeError("a collective that others are not in")


def test_ranks_that_all_come_pass_however_often(ranks):
    def work(world):
        for _ in range(20):
            meet(world, "save_state")
        return "passed"

    assert ranks(3, work) == ["passed"] * 3


def test_a_call_on_the_main_process_only_says_whom_it_waits_for_and_then_raises(ranks, clock, capfd):
    def work(world):
        if world.rank == 0:
            meet(world, "save_state")

    error, *_ = ranks(3, work)
    assert isinstance(error, CheckpointError)
    assert (
        "save_state must be called on every rank; ranks 1, 2 did not come within 0.5 s: drop the `if is_main_process`"
        in str(error)
    )
    assert "wait_s=5" in str(error)
    assert (
        "rank 0 waits in save_state for ranks 1, 2; every rank must call save_state" in capfd.readouterr().err
    )


def test_after_a_failed_meeting_the_next_one_works(ranks):
    failed = threading.Event()

    def work(world):
        if world.rank == 0:
            with pytest.raises(CheckpointError):
                meet(world, "load_state", 0)
            failed.set()
        else:
            assert failed.wait(60)
        meet(world, "load_state")
        return "met"

    assert ranks(2, work) == ["met", "met"]


@pytest.mark.parametrize("wait_s", [-1, "5", float("nan")])
def test_a_time_that_is_none_is_refused(wait_s):
    with pytest.raises(ValueError, match="save_state: wait_s must be a number of seconds"):
        meet(SimpleNamespace(rank=0, size=1, is_main=True), "save_state", wait_s)


def test_rank_0_may_be_late(ranks, clock):
    late = threading.Event()

    def work(world):
        if world.rank == 0:
            assert late.wait(60)
        else:  # it waits longer than the limit that rank 0 itself has
            clock.on_sleep = lambda now: late.set() if now > 2 * meeting.WAIT_S else None
        meet(world, "save_state")
        return "met"

    assert ranks(2, work) == ["met", "met"]


def test_a_rank_that_fails_while_the_others_wait_inside_shows_its_error_and_raises_it(ranks, clock, capfd):
    gone = threading.Event()

    def work(world):
        try:
            with together(world, "collecting the weights"):
                if world.rank == 1:
                    raise ZeroDivisionError("of rank 1")
                assert gone.wait(60)  # as in a collective that rank 1 will not join
        finally:
            gone.set()

    stuck, failed = ranks(2, work)
    assert isinstance(failed, ZeroDivisionError)
    assert "another rank failed while collecting the weights" in str(stuck)
    shown = capfd.readouterr().err
    assert "rank 1 failed while collecting the weights, and the other ranks are still at it" in shown
    assert "ZeroDivisionError: of rank 1" in shown


def test_ranks_leave_a_block_together_and_a_failed_one_knows_it(ranks):
    def work(world):
        return [leave_block(world, (lambda: None) if world.rank == 2 else None) for _ in range(5)]

    assert ranks(3, work) == [[True] * 5] * 3


def test_the_others_return_when_the_leader_has_done_the_work_and_hear_its_words(ranks):
    done = []

    def work(world):
        told = [led(world, "save", f"at it on {world.rank}", 1, lambda: done.append(1)) for _ in range(3)]
        return told, len(done)

    assert ranks(3, work) == [(["at it on 1"] * 3, 3)] * 3


def test_what_runs_the_script_on_one_rank_alone_makes_no_difference(ranks, clock):
    script = compile("def main():\n    call()\nmain()", "train.py", "exec")
    begun = threading.Event()

    def work(world):
        def call():
            return led(world, "save", "saving", 0, begun.set)

        def profiled():
            exec(script, {"__name__": "__main__", "call": call})

        if world.rank == 0:
            profiled()
        else:
            assert begun.wait(60)
            exec(script, {"__name__": "__main__", "call": call})
        return "returned"

    assert ranks(2, work) == ["returned"] * 2


def test_a_leader_that_does_not_come_is_told_after_a_minute_and_one_that_works_may_take_longer(
    ranks, clock, capfd
):
    begun, late = threading.Event(), threading.Event()

    def write():
        begun.set()
        assert late.wait(60)

    def work(world):
        if world.rank == 1:  # it waits longer for the end than it would for the beginning
            assert begun.wait(60)
            clock.on_sleep = lambda now: late.set() if now > 2 * meeting.WAIT_S else None
        led(world, "save", "writing a", 0, write)
        if world.rank == 1:
            led(world, "save", "writing b", 0, write)

    said = r"\(writing b\): rank 0, which writes, did not come there within 0.5 s of rank 1, which goes on"
    with pytest.warns(UserWarning, match=said):
        assert ranks(2, work) == [None, None]
    shown = capfd.readouterr().err
    assert "(writing a) for rank 0, which writes, to end" in shown
    assert "(writing b) for rank 0, which writes, to come there" in shown


def test_without_a_store_the_leader_works_and_nobody_waits():
    done = []
    for rank in (1, 0):
        world = SimpleNamespace(rank=rank, size=2, comm=_NoComm())
        assert led(world, "save", "saving", 0, lambda rank=rank: done.append(rank)) == "saving"
    assert done == [0]
