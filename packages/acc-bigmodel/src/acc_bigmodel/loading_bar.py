"""A progress bar for a load that turns out to take longer than a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from acc_ops.optional import is_available
from acc_ops.progress import tqdm
from acc_ops.world import current_world

_SHOWN_AFTER_S = 1.0


class LoadingBar:
    """Counts the bytes of a load, from any thread, and shows them once it has lasted a second; a context manager.

    Only the first rank of a machine shows it, and nothing is shown without tqdm.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, make: Callable[..., Any] = tqdm
    ) -> None:
        self.expected_bytes = 0
        self.done_bytes = 0
        self._clock, self._make = clock, make
        self._start = clock()
        self._may_show = current_world().is_local_main  # asked here: a helper thread may not know its rank
        self._bar: Any = None
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Say that `nbytes` more are to be loaded; before the first of them are."""
        self.expected_bytes += nbytes

    def advance(self, nbytes: int) -> None:
        """Say that `nbytes` more are loaded."""
        with self._lock:
            self.done_bytes += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            elif self._may_show and self._clock() - self._start > _SHOWN_AFTER_S:
                self._may_show = is_available("tqdm")
                if self._may_show:
                    self._bar = self._make(
                        desc="loading weights",
                        total=self.expected_bytes,
                        initial=self.done_bytes,
                        unit="B",
                        unit_scale=True,
                        main_process_only=False,
                    )

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
