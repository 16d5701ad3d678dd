"""Saves that go on beside the training: one at a time, waited for, and never lost in silence.

[Note: where an error goes] A save in the background ends on all ranks alike. It says on stderr that it failed, at once. The next
`save_state`, `load_state`, `wait_for_save` or `end_training` waits for it and raises the error; if none comes, it is said once more when the
process ends. The thread is no daemon: Python waits for it before it ends, however the script came to its end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from acc_ops.world import World, use_world

from .layout import CheckpointError
from .meeting import apart
from .staging import Staging

if TYPE_CHECKING:
    from .contents import Run


class Background:
    """The thread and the buffers of one run. Every rank makes one at the same time."""

    def __init__(self, world: World) -> None:
        self.world = apart(world)  # through which the threads of the ranks speak
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], None] = _nothing
        self._error: BaseException | None = None
        self._untold = _Untold()
        weakref.finalize(self, _tell, self._untold)

    def start(self, folder: str, work: Callable[[World], None], undo: Callable[[], None]) -> None:
        """Do `work` in a thread. When it fails, the next `wait` calls `undo` and raises. The last save must be over."""
        self._undo = undo
        thread = threading.Thread(
            target=self._run, args=(folder, work), name=f"saving {folder}", daemon=False
        )
        try:
            thread.start()
        except (
            RuntimeError
        ):  # no thread to be had: the other ranks wait for this one, so it works here and now
            self._run(folder, work)
        else:
            self._thread = thread

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
        self.staging = Staging()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, folder: str, work: Callable[[World], None]) -> None:
        try:
            with use_world(self.world):
                work(self.world)
        except BaseException as error:  # noqa: BLE001  raised by the next `wait`
            self._error = error
            self._untold.text = (
                f"the save into {folder} failed in the background: {type(error).__name__}: {error}"
            )
            print(f"acc: {self._untold.text}", file=sys.stderr, flush=True)


class _Untold:
    """What nobody has been told of the last save: apart from its error, which knows the run."""

    text = ""


def finish_save(run: Run) -> None:
    """Wait for a save of `run` in the background. CheckpointError, naming the folder, when it failed; it is raised once."""
    if run._background is not None:
        run._background.wait()


def _tell(untold: _Untold) -> None:
    """When the process ends, or nobody has the run any more."""
    if untold.text:
        print(f"acc: {untold.text}; nobody asked for it, so nothing was raised", file=sys.stderr, flush=True)


def _nothing() -> None:
    return None
