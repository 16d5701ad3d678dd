"""The interface of a tracker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from acc_ops.world import current_world

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Method decorator: only rank 0 runs it, where the tracker says `main_process_only`."""

    @functools.wraps(function)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not current_world().is_main:
            return None
        return function(self, *args, **kwargs)

    return chosen  # type: ignore[return-value]


class GeneralTracker:
    """Base of all trackers. A class of its own needs:

    `name` (str), `requires_logging_directory` (bool), and `tracker`, a property with the library's own run (`NotImplementedError` otherwise,
    naming what is missing). The calls it receives, in order: 1 `start()`, 2 `store_init_configuration(values)`, 3 `log(values, step)`
    any number of times, 4 `finish()`. An Accelerator makes these calls on rank 0; `main_process_only` (default True) says whether methods
    under `on_main_process` keep quiet on the other ranks when a script makes them itself. `_blank=True` leaves the checks out.
    """

    name: str
    requires_logging_directory: bool
    main_process_only = True
    counts_steps: ClassVar[bool] = False  # whether a `log` without a step is the step after the last one
    library_available: ClassVar[Callable[[], bool]] = staticmethod(lambda: True)

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [
            name
            for name in ("name", "requires_logging_directory", "tracker")
            if not hasattr(type(self), name) and not hasattr(self, name)
        ]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks what every tracker needs: {', '.join(missing)} "
                "(`name` and `requires_logging_directory` as class attributes, `tracker` as a property)"
            )

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the library it stands for is there; a tracker without one always is."""
        return cls.library_available()

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Note the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note values of one step."""

    def finish(self) -> None:
        """The run is over."""

    def leave_out(self, key: str, why: str) -> None:
        """Say, once for each key, that this tracker does not show a value."""
        told: set[str] = self.__dict__.setdefault("_left_out", set())
        if key not in told:
            told.add(key)
            logger.warning("tracker %r leaves out %r: %s", getattr(self, "name", "?"), key, why)


class BlankTracker(GeneralTracker):
    """Stands where no tracker runs: on other ranks, without `log_with`, and for one that failed. It takes every call and does nothing."""

    def __init__(self, name: str = "") -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> Any:
        """Itself: the library's run takes every call too."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """What a blank tracker does."""
