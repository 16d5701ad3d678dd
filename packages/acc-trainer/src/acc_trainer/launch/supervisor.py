"""The launcher of one machine is a supervisor: signals reach the workers, the first failure ends all, no orphan is left.

[Note: how it waits]
Every worker is the leader of a session of its own, so a signal sent to its process group reaches what it started too.
SIGCHLD and the signals we pass on are blocked and taken one by one (`sigtimedwait`), so there is no handler and no
race; a grace period is the time-out of that wait. Where `sigtimedwait` is missing (macOS), handlers write into a pipe.

[Note: the guardian]
A process forked before the workers reads a pipe whose other end only the launcher holds. When the launcher dies without
having said goodbye (SIGKILL, out of memory), the pipe ends and the guardian ends the workers' groups.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from .guardian import Guardian, signal_group
from .signals import HandledSignals, TakenSignals

GRACE_S = 30.0


class WorkerStart:  # not a dataclass: each of those would cost a launch 1 ms before its first line
    """One process to start: its global rank, the command and its whole environment."""

    def __init__(
        self, *, rank: int, command: Sequence[str], environ: Mapping[str, str], keeps_stdin: bool = False
    ) -> None:
        self.rank = rank
        self.command = command
        self.environ = environ
        self.keeps_stdin = keeps_stdin


class Outcome:
    """How a group of workers ended: the exit code to leave with, the rank that failed first (None: none did), and the
    signal that was sent to the launcher to stop it, if there was one."""

    def __init__(
        self,
        *,
        code: int,
        rank: int | None = None,
        pid: int | None = None,
        stopped_by: signal.Signals | None = None,
        out_of_time: bool = False,
    ) -> None:
        self.code = code
        self.rank = rank
        self.pid = pid
        self.stopped_by = stopped_by
        self.out_of_time = out_of_time  # it went on after `stopped_by`, and was killed

    @property
    def is_news(self) -> bool:
        """Whether there is something to say: a failure nobody asked for, or a worker that would not stop."""
        return self.rank is not None and (self.stopped_by is None or self.out_of_time)

    def describe(self) -> str:
        """One line about the failure, for people."""
        if self.rank is None:
            return "all workers ended well"
        if self.out_of_time and self.stopped_by is not None:
            return (
                f"rank {self.rank} (process {self.pid}) went on after {self.stopped_by.name} and was killed"
            )
        how = (
            f"was ended by {signal_name(self.code - 128)}"
            if self.code > 128
            else f"left with exit code {self.code}"
        )
        return f"rank {self.rank} (process {self.pid}) {how}; the other workers were stopped"


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11; the number as text when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def supervise(starts: Sequence[WorkerStart], *, grace_s: float = GRACE_S) -> Outcome:
    """Start the workers, wait until all have ended, and say how.

    The first worker that fails has the others stopped: SIGTERM to their groups, SIGKILL `grace_s` seconds later. A
    signal sent to the launcher goes to every group once. SIGTERM gives the workers `grace_s` seconds too, Ctrl-C (SIGINT) all
    the time they need; a second SIGTERM or SIGINT kills. `OSError` when a worker cannot be started; those already started are
    ended first.
    """
    signals = TakenSignals() if hasattr(signal, "sigtimedwait") else HandledSignals()
    with signals, Guardian() as guardian:
        group = _Group(guardian, grace_s)
        try:
            for start in starts:
                group.start(start, signals.inherited_mask)
            return _wait(group, signals)
        finally:
            group.kill()


def _wait(group: _Group, signals: TakenSignals | HandledSignals) -> Outcome:
    stops = 0
    stopped_by: signal.Signals | None = None
    killed_late = False
    while group.live:
        number = signals.wait(group.seconds_left())
        if number in (signal.SIGTERM, signal.SIGINT):
            stops += 1
            stopped_by = stopped_by or signal.Signals(number)
        out_of_time = group.seconds_left() == 0.0
        if stops > 1 or out_of_time:
            group.send(signal.SIGKILL)
            group.deadline = None
            killed_late = killed_late or out_of_time
        elif number == getattr(signal, "SIGTSTP", -1):
            _pause(group)
        elif number is not None and number != signal.SIGCHLD:
            group.send(number)
            if number == signal.SIGTERM:
                group.give_grace()
        for start, pid, code in group.reap():
            if code and group.failure is None:
                late = killed_late and code == 128 + signal.SIGKILL
                group.failure = Outcome(
                    code=code, rank=start.rank, pid=pid, stopped_by=stopped_by, out_of_time=late
                )
                group.stop_rest(pid, already_told=stopped_by is not None)
    return group.failure or Outcome(code=0, stopped_by=stopped_by)


def _pause(group: _Group) -> None:
    """Ctrl-Z: the workers have no terminal that could stop them, so they are stopped and continued with us."""
    group.send(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    group.send(signal.SIGCONT)


class _Group:
    def __init__(self, guardian: Guardian, grace_s: float) -> None:
        self.guardian = guardian
        self.grace_s = grace_s
        self.live: dict[int, WorkerStart] = {}  # by process id
        self.failure: Outcome | None = None
        self.deadline: float | None = None  # when SIGKILL follows, by the monotonic clock

    def start(self, start: WorkerStart, mask: Sequence[int]) -> None:
        pid = _spawn(start, mask)
        self.guardian.watch(pid)
        self.live[pid] = start

    def send(self, number: int) -> None:
        for pid in self.live:
            signal_group(pid, number)

    def reap(self) -> Iterator[tuple[WorkerStart, int, int]]:
        for pid in list(self.live):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self.guardian.forget(pid)
                yield self.live.pop(pid), pid, code if code >= 0 else 128 - code

    def stop_rest(self, failed: int, *, already_told: bool) -> None:
        """After the first failure: what the failed worker left behind and the others get `grace_s` seconds to end."""
        signal_group(failed, signal.SIGTERM)
        if not already_told:
            self.send(signal.SIGTERM)
        self.give_grace()

    def give_grace(self) -> None:
        """From now on the workers have `grace_s` seconds to end, if they are not being counted already."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.grace_s

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def kill(self) -> None:
        """End what is still alive, whatever happened (normally nothing is)."""
        self.send(signal.SIGKILL)
        for pid in self.live:
            os.waitpid(pid, 0)


def _spawn(start: WorkerStart, mask: Sequence[int]) -> int:
    command = [str(part) for part in start.command]
    environ = dict(start.environ)
    actions = [] if start.keeps_stdin else [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    try:
        return os.posix_spawnp(
            command[0],
            command,
            environ,
            setsid=True,
            setsigmask=mask,
            setsigdef=restored_signals(),
            file_actions=actions,
        )
    except (NotImplementedError, AttributeError):  # this C library cannot do it in one call
        return _fork_and_exec(command, environ, mask, start.keeps_stdin)


def _fork_and_exec(
    command: list[str], environ: dict[str, str], mask: Sequence[int], keeps_stdin: bool
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    failed_read, failed_write = os.pipe()  # closed by a successful exec, carries the error number otherwise
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if not keeps_stdin:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in restored_signals():
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(command[0], command, environ)
        except OSError as error:
            os.write(failed_write, str(error.errno or errno.EIO).encode())
        finally:
            os._exit(127)
    os.close(failed_write)
    with os.fdopen(failed_read, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), os.strerror(int(failure)), command[0])
    return pid


def restored_signals() -> list[signal.Signals]:
    """What the interpreter ignores for itself and a worker must not inherit."""
    return [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]
