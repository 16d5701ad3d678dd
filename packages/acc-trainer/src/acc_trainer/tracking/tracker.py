"""The interface of a tracker, and the table of those there are."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from acc_ops.enums import LoggerType
from acc_ops.logging import get_logger
from acc_ops.world import current_world

logger = get_logger(__name__)
plain_logger = logging.getLogger(__name__)  # where several processes may speak
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
    any number of times, 4 `finish()`. `main_process_only` (default True): rank 0 alone tracks. `_blank=True` leaves the checks out.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [
            name
            for name in ("name", "requires_logging_directory", "tracker")
            if not hasattr(type(self), name)
        ]
        missing = [name for name in missing if not hasattr(self, name)]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks what every tracker needs: {', '.join(missing)} "
                "(`name` and `requires_logging_directory` as class attributes, `tracker` as a property)"
            )

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Note the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note values of one step."""

    def finish(self) -> None:
        """The run is over."""


LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}
_IS_INSTALLED: dict[
    str, Callable[[], bool]
] = {}  # by name; a tracker that is not named here needs no library


def add_own(tracker_class: Any, is_installed: Callable[[], bool]) -> None:
    """One of our trackers, and how to find out whether its library is there."""
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class
    _IS_INSTALLED[tracker_class.name] = is_installed


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with="name"` mean this class.

    Raises `ValueError` when it is no GeneralTracker, or lacks `name` or `requires_logging_directory`; a name that is taken is replaced
    with a warning.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"a tracker class must derive from GeneralTracker, got {tracker_class!r}")
    for needed in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, needed):
            raise ValueError(f"{tracker_class.__name__} needs the class attribute {needed}")
    name = str(tracker_class.name)  # type: ignore[attr-defined]
    if name in LOGGER_TYPE_TO_CLASS:
        plain_logger.warning(
            "tracker %r was %s and is now %s",
            name,
            LOGGER_TYPE_TO_CLASS[name].__name__,
            tracker_class.__name__,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    _IS_INSTALLED.pop(name, None)


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose library is installed."""
    return [LoggerType(name) for name in _usable() if name in LoggerType.list()]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[str | GeneralTracker]:
    """The trackers that `log_with` (names, instances, or a list of them) means, each once, in order; "all": every installed one.

    Those that are not installed are left out with a note to the log. Raises `ValueError` for an unknown name, and for one that needs a
    `logging_dir` when there is none.
    """
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    named = [str(getattr(one, "value", one)) for one in asked if not _is_tracker(one)]
    if "all" in named:
        instances = [one for one in asked if _is_tracker(one)]
        fit = [name for name in _usable() if logging_dir is not None or not _needs_folder(name)]
        return [*instances, *(name for name in fit if name not in {one.name for one in instances})]
    kept: list[str | GeneralTracker] = []
    for one in asked:
        if _is_tracker(one):
            if all(one is not known for known in kept):
                kept.append(one)
            continue
        name = str(getattr(one, "value", one))
        _check_name(name)
        if name not in LOGGER_TYPE_TO_CLASS or name not in _usable():
            plain_logger.debug("tracker %r is not installed here and is left out", name)
            continue
        if logging_dir is None and _needs_folder(name):
            raise ValueError(
                f"tracker {name!r} writes files: give logging_dir (project_dir or project_config)"
            )
        if name not in kept:
            kept.append(name)
    return kept


def _is_tracker(thing: Any) -> bool:
    return isinstance(thing, GeneralTracker)


def _check_name(name: str) -> None:
    known = sorted({*LoggerType.list(), *LOGGER_TYPE_TO_CLASS})
    if name not in known:
        raise ValueError(
            f"unknown tracker {name!r}: choose from {', '.join(known)}, or give a GeneralTracker"
        )
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(
            f"tracker {name!r} is not built yet in acc: choose from {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}, "
            "or give a GeneralTracker of your own"
        )


def _needs_folder(name: str) -> bool:
    return bool(getattr(LOGGER_TYPE_TO_CLASS[name], "requires_logging_directory", False))


def _usable() -> Iterable[str]:
    return [name for name in LOGGER_TYPE_TO_CLASS if name not in _IS_INSTALLED or _IS_INSTALLED[name]()]
