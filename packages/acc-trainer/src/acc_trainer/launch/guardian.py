"""The guardian ends the workers' process groups when the launcher dies without a word."""

from __future__ import annotations

import os
import signal
import time
from types import TracebackType

_GRACE_S = 5.0
_GOODBYE = 0


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group led by `pid`; nothing when it is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # PermissionError: macOS says so of a group of zombies
        return


class Guardian:
    """A process that waits for the launcher's end; told of every worker with `watch`, of every end with `forget`."""

    def __enter__(self) -> Guardian:
        read, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _guard(read)
            finally:
                os._exit(0)
        os.close(read)
        return self

    def watch(self, pid: int) -> None:
        """`pid` was started and leads a group."""
        self._say(pid)

    def forget(self, pid: int) -> None:
        """`pid` has been waited for; its number may belong to somebody else soon."""
        self._say(-pid)

    def _say(self, number: int) -> None:
        try:
            os.write(self._pipe, b"%d\n" % number)
        except BrokenPipeError:  # somebody ended the guardian: we go on without its protection
            return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say(_GOODBYE)
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


def _guard(pipe: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whoever reads our output must see its end when the workers end
        os.dup2(silent, descriptor)
    groups: set[int] = set()
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            said = int(line)
            if said == _GOODBYE:
                return
            (groups.add if said > 0 else groups.discard)(abs(said))
    for group in groups:
        signal_group(group, signal.SIGTERM)
    ends = time.monotonic() + _GRACE_S
    while any(_runs(group) for group in groups) and time.monotonic() < ends:
        time.sleep(0.02)
    for group in groups:
        signal_group(group, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether the group has a member that is more than a zombie (a foreign init may never wait for it)."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        with open(f"/proc/{group}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:  # the leader is gone but members live, or there is no /proc
        return True
