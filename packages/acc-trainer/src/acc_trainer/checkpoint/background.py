"""Saves that go on beside the training: one at a time, waited for, and never lost in silence.

[Note: where an error goes] A save in the background ends on all ranks alike. It says on stderr that it failed, at once. The next
`save_state`, `load_state`, `wait_for_save` or `end_training` waits for it and raises the error; if none comes, it is said once more when the
process ends. The thread is no daemon: Python waits for it before it ends, however the script came to its end.

[Note: Ctrl-C] An interrupt may end any wait, and must not end the save: the next wait goes on waiting. `Thread.join` cannot be asked for that, since
Python up to 3.12 takes a thread for ended when a join of it was interrupted, and no longer waits for it at the end of the process either. So an
event says when a save is over, and a thread is joined after that.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from acc_ops.lazy import LazyModule
from acc_ops.world import World, use_world

from .layout import CheckpointError
from .meeting import apart

if TYPE_CHECKING:
    from acc_plugins.states.part import Part

    from .contents import Run
    from .staging import Staging

staging = LazyModule("acc_trainer.checkpoint.staging")  # a load, and a save that blocks, do without it


class Background:
    """The thread and the buffers of one run. Every rank makes one at the same time."""

    def __init__(self, world: World) -> None:
        self.world = apart(world)  # through which the threads of the ranks speak
        self.staging: Staging = staging.Staging()
        self._copying = threading.Lock()
        self._job: _Job | None = None
        self._undo: Callable[[], None] = _nothing
        self._error: BaseException | None = None
        self._untold = _Untold()
        weakref.finalize(self, _tell, self._untold)

    @property
    def is_writing(self) -> bool:
        """Whether a save is not over yet."""
        return self._job is not None and not self._job.is_over

    def copies(self, parts: Iterable[Part]) -> list[Part]:
        """`parts` with copies of their states, in the buffers that the last save was written from, which must be over.

        CheckpointError for a call from within another one, as that of a signal handler.
        """
        self._join()
        if not self._copying.acquire(blocking=False):
            raise CheckpointError(
                "another save_state of this run is copying its state at this moment: let a signal handler set a flag, and save behind the step"
            )
        try:
            return self.staging.copies(parts)
        finally:
            self._copying.release()

    def start(self, folder: str, work: Callable[[World], None], undo: Callable[[], None]) -> None:
        """Do `work` in a thread. When it fails, the next `wait` calls `undo` and raises.

        After an interrupt in here the work either goes on (`is_writing`) or has not begun and never will.
        """
        self._join()
        self._undo = undo
        job = self._job = self._untold.job = _Job()
        job.thread = threading.Thread(
            target=self._run, args=(folder, work, job), name=f"saving {folder}", daemon=False
        )
        try:
            job.thread.start()
        except (
            RuntimeError
        ):  # no thread to be had: the other ranks wait for this one, so it works here and now
            self._run(folder, work, job)
        except BaseException:
            if job.take():
                job.end()
            raise

    def wait(self) -> None:
        """Return when nothing is being saved any more. CheckpointError, from its cause, when the last save failed."""
        self._join()
        error, self._error = self._error, None
        if error is None:
            return
        said, self._untold.text = self._untold.text, ""
        self._undo()
        raise CheckpointError(said) from error

    def release(self) -> None:
        """Wait for the save and give its buffers back; its error stays for the next `wait`."""
        self._join()
        self.staging = staging.Staging()

    def _join(self) -> None:
        if self._job is not None:
            self._job.wait()
            self._job = self._untold.job = None

    def _run(self, folder: str, work: Callable[[World], None], job: _Job) -> None:
        if not job.take():
            return
        try:
            with use_world(self.world):
                work(self.world)
        except BaseException as error:  # noqa: BLE001  raised by the next `wait`
            self._error = error
            self._untold.text = (
                f"the save into {folder} failed in the background: {type(error).__name__}: {error}"
            )
            print(f"acc: {self._untold.text}", file=sys.stderr, flush=True)
        finally:
            job.end()


class _Job:
    """One save, which whoever takes it first does or calls off, and the end of it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._taken = threading.Lock()
        self._over = threading.Event()
        self._process = os.getpid()

    @property
    def is_over(self) -> bool:
        return self._over.is_set() or os.getpid() != self._process  # a forked child has no such thread

    def take(self) -> bool:
        """Whether nobody else has taken it."""
        return self._taken.acquire(blocking=False)

    def end(self) -> None:
        self._over.set()

    def wait(self) -> None:
        """Until it is over. An interrupt ends this wait alone."""
        if self.is_over:
            return
        self._over.wait()
        if self.thread is not None and self.thread.ident is not None:
            self.thread.join()


class _Untold:
    """What nobody has been told of the last save: apart from its error, which knows the run. And whether it is on."""

    text = ""
    job: _Job | None = None


def finish_save(run: Run) -> None:
    """Wait for a save of `run` in the background. CheckpointError, naming the folder, when it failed; it is raised once."""
    if run._background is not None:
        run._background.wait()


def _tell(untold: _Untold) -> None:
    """When the process ends, or nobody has the run any more."""
    if untold.job is not None:
        untold.job.wait()
    if untold.text:
        print(f"acc: {untold.text}; nobody asked for it, so nothing was raised", file=sys.stderr, flush=True)


def _nothing() -> None:
    return None
