"""One use of a module's offloaded weights, a call or a visit: it ends once, when it is freed at the latest.

What an interrupt leaves open is closed when the frames of the call are freed. A `__del__` would run after every call, and
swallow an interrupt that comes in it; the callback of a weak reference runs only where somebody still keeps that reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from acc_hooks.inputs import begin_forward, end_forward, runs_forward


class Use:
    """1 `begin` 2 `hold` 3 `end`, in `finally`; an interrupt in between, or in `end`, is answered when it is freed."""

    __slots__ = ("__weakref__", "_guard", "_open", "input_device")

    def __init__(self) -> None:
        self.input_device: torch.device | None = None
        self._open = _Open()
        self._guard: weakref.ref[Use] | None = None
        if not torch.compiler.is_compiling():
            self._guard = weakref.ref(self, self._open.freed)
            _guards[id(self._open)] = self._guard

    def begin(self) -> None:
        """This is a forward: the outermost one is noted (inputs.py)."""
        if not runs_forward():
            self._open.is_outermost = True
            begin_forward()

    def hold(self, hold: Callable[[object], Any], let_go: Callable[[object], Any]) -> None:
        """`hold(key)` now, `let_go(key)` in the end."""
        self._open.let_go = let_go
        hold(self._open)

    def end(self) -> None:
        """Let go of the weights, and end the forward if this one began it."""
        self._open.end()
        if self._guard is not None:
            _guards.pop(id(self._open), None)
            self._guard = None  # the last reference to it


class _Open:
    """What has to be closed."""

    __slots__ = ("is_outermost", "let_go")

    def __init__(self) -> None:
        self.is_outermost = False
        self.let_go: Callable[[object], Any] | None = None

    def end(self) -> None:
        try:
            if self.let_go is not None:
                try:
                    self.let_go(self)
                except Exception:  # said once
                    self.let_go = None
                    raise
                self.let_go = None
        finally:
            if self.is_outermost:
                end_forward()
                self.is_outermost = False

    def freed(self, guard: weakref.ref[Use]) -> None:  # noqa: ARG002 - it may be dead before it was noted, and has no hash
        self.end()
        _guards.pop(id(self), None)


_guards: dict[int, weakref.ref[Use]] = {}  # of the uses that have not ended, by the id of what is open
