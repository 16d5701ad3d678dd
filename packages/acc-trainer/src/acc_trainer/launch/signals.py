"""Signals as things to wait for: taken one by one from a blocked set, or written into a pipe where that is missing."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")


def passed_on() -> list[signal.Signals]:
    """The signals a launcher passes on to its workers: those that are not ignored on purpose (nohup, a shell's `&`)."""
    known = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


class TakenSignals:
    """Block SIGCHLD and the signals to pass on while entered; `wait` takes the next one.

    `inherited_mask` is the mask from before, which workers must get back.
    """

    def __enter__(self) -> TakenSignals:
        self._child = signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # when ignored, children could not be waited for
        self._set = {signal.SIGCHLD, *passed_on()}
        self.inherited_mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, self._set))
        return self

    def wait(self, timeout_s: float | None) -> int | None:
        """The number of the next signal; None when there is none within `timeout_s` seconds (None: for ever)."""
        if timeout_s is None:
            return signal.sigwaitinfo(self._set).si_signo
        taken = signal.sigtimedwait(self._set, timeout_s)
        return taken.si_signo if taken else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while signal.sigtimedwait(self._set, 0):  # what came too late for anybody to act on
            continue
        signal.pthread_sigmask(signal.SIG_SETMASK, self.inherited_mask)
        signal.signal(signal.SIGCHLD, self._child if self._child is not None else signal.SIG_DFL)


class HandledSignals:
    """The same by handlers and a pipe, for systems without `sigtimedwait`."""

    def __enter__(self) -> HandledSignals:
        self.inherited_mask: list[int] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._write = write
        self._previous: dict[signal.Signals, Any] = {}
        for number in (signal.SIGCHLD, *passed_on()):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        try:
            os.write(self._write, bytes([number]))
        except BlockingIOError:  # the pipe is full of signals nobody has taken yet
            return

    def wait(self, timeout_s: float | None) -> int | None:
        """The number of the next signal; None when there is none within `timeout_s` seconds (None: for ever)."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        return os.read(self._read, 1)[0] if ready else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)
