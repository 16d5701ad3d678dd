"""Which trackers there are, and which of them a run means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from acc_ops.enums import LoggerType
from acc_ops.optional import is_tensorboard_available
from acc_trainer.tracking.tensorboard import TensorBoardTracker
from acc_trainer.tracking.tracker import GeneralTracker

logger = logging.getLogger(__name__)  # where several processes may speak

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {TensorBoardTracker.name: TensorBoardTracker}
_IS_INSTALLED: dict[str, Callable[[], bool]] = {  # a tracker that is not named here needs no library
    TensorBoardTracker.name: is_tensorboard_available,
}


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
        logger.warning(
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
            logger.debug("tracker %r is not installed here and is left out", name)
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
