"""Several calls, each of which is made whatever another one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def call_all(calls: Iterable[Callable[[], Any]]) -> None:
    """Call them in order; raises the last error, which has the ones before it as its context.

    Unlike `contextlib.ExitStack` it keeps no reference to the error, so that the frames of an interrupted call are freed.
    """
    rest = iter(calls)
    for call in rest:
        try:
            call()
        except BaseException:
            call_all(rest)
            raise
