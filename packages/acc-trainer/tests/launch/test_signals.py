"""Signals are taken one by one, in both ways of waiting, and everything is as before afterwards."""

from __future__ import annotations

import signal
import threading

import pytest

from acc_trainer.launch.signals import HandledSignals, TakenSignals, passed_on

WAYS = [HandledSignals, *([TakenSignals] if hasattr(signal, "sigtimedwait") else [])]


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_is_taken_and_not_acted_on(way):
    with way() as signals:
        # to this thread: others of the test process have not blocked it, as those of a launcher (none) would
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert signals.wait(5.0) == signal.SIGTERM
        assert signals.wait(0.01) is None


@pytest.mark.parametrize("way", WAYS)
def test_handlers_and_mask_are_put_back(way):
    before = [(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with way():
        pass
    assert [(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_signal_ignored_on_purpose_is_not_passed_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in passed_on()
        assert signal.SIGTERM in passed_on()
    finally:
        signal.signal(signal.SIGHUP, before)
