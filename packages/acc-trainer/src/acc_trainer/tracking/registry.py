"""Which trackers there are, and which of them a run means."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from acc_ops.enums import LoggerType
from acc_ops.logging import get_logger
from acc_trainer.tracking.aim import AimTracker
from acc_trainer.tracking.clearml import ClearMLTracker
from acc_trainer.tracking.comet import CometMLTracker
from acc_trainer.tracking.csv_rows import CsvTracker
from acc_trainer.tracking.dvclive import DVCLiveTracker
from acc_trainer.tracking.json_lines import JsonLinesTracker
from acc_trainer.tracking.mlflow import MLflowTracker
from acc_trainer.tracking.swanlab import SwanLabTracker
from acc_trainer.tracking.tensorboard import TensorBoardTracker
from acc_trainer.tracking.tracker import GeneralTracker
from acc_trainer.tracking.trackio import TrackioTracker
from acc_trainer.tracking.wandb import WandBTracker

ENTRY_POINTS = "acc_trainer.trackers"  # the group in which another package names its trackers

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    kind.name: kind
    for kind in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
        JsonLinesTracker,
        CsvTracker,
    )
}
_told = get_logger(__name__)  # once in a world
_logger = logging.getLogger(__name__)  # whoever registers


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with="name"` mean this class. Another package's entry point in the group "acc_trainer.trackers" does the same by itself.

    Raises `ValueError` when it is no GeneralTracker, or lacks `name` or `requires_logging_directory`; a name that is taken is replaced
    with a warning.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"a tracker class must derive from GeneralTracker, got {tracker_class!r}")
    for needed in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, needed):
            raise ValueError(f"{tracker_class.__name__} needs the class attribute {needed}")
    name = str(tracker_class.name)
    if name in LOGGER_TYPE_TO_CLASS:
        before = LOGGER_TYPE_TO_CLASS[name].__name__
        _logger.warning("tracker %r was %s and is now %s", name, before, tracker_class.__name__)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers of the specification whose library is installed."""
    return [LoggerType(name) for name in _usable() if name in LoggerType.list()]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[str | GeneralTracker]:
    """The trackers that `log_with` (names, instances, or a list of them) means, each once, in order; "all": every one that can run here.

    Those whose library is not installed are left out with a warning. Raises `TypeError` for what is neither name nor instance, `ValueError`
    for an unknown name, and for one that needs a `logging_dir` when there is none.
    """
    asked = (
        list(log_with) if isinstance(log_with, (list, tuple, set)) else [] if log_with is None else [log_with]
    )
    if any(_name_of(one) == LoggerType.ALL.value for one in asked):
        _load_entry_points()
        instances = [one for one in asked if isinstance(one, GeneralTracker)]
        fit = [name for name in _usable() if logging_dir is not None or not _needs_folder(name)]
        asked = [*instances, *(name for name in fit if name not in {one.name for one in instances})]
    kept: list[str | GeneralTracker] = []
    for one in asked:
        chosen = one if isinstance(one, GeneralTracker) else _usable_name(_name_of(one), logging_dir)
        if chosen is not None and all(chosen is not known and chosen != known for known in kept):
            kept.append(chosen)
    return kept


def _name_of(one: Any) -> str:
    """The name in a name or a LoggerType; that of an instance is not asked for."""
    if isinstance(one, GeneralTracker):
        return ""
    name = getattr(one, "value", one)
    if not isinstance(name, str):
        raise TypeError(f"log_with takes names, LoggerType members and GeneralTracker instances, got {one!r}")
    return name


def _usable_name(name: str, logging_dir: Any) -> str | None:
    """`name` if its tracker can run here, None when its library is missing."""
    if name not in LOGGER_TYPE_TO_CLASS:
        _load_entry_points(name)
    if name not in LOGGER_TYPE_TO_CLASS:
        known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
        raise ValueError(f"unknown tracker {name!r}: choose from all, {known}, or give a GeneralTracker")
    if not LOGGER_TYPE_TO_CLASS[name].is_installed():
        _told.warning("tracker %r is left out: its library is not installed here", name)
        return None
    if logging_dir is None and _needs_folder(name):
        raise ValueError(f"tracker {name!r} writes files: give logging_dir (project_dir or project_config)")
    return name


def _load_entry_points(only: str | None = None) -> None:
    """Register what other packages offer; a name that is taken stays. ValueError for one that does not load and was asked for by name."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in LOGGER_TYPE_TO_CLASS or only not in (None, point.name):
            continue
        try:
            kind = point.load()
            if getattr(kind, "name", None) != point.name:
                raise ValueError(f"its class {kind!r} has the name {getattr(kind, 'name', None)!r}")
            register_tracker_class(kind)
        except Exception as error:  # another package's code
            told = f"the entry point {point.name!r} = {point.value!r} of {ENTRY_POINTS} gives no tracker: {error}"
            if only is not None:
                raise ValueError(told) from error
            _told.warning(told)


def _needs_folder(name: str) -> bool:
    return bool(LOGGER_TYPE_TO_CLASS[name].requires_logging_directory)


def _usable() -> Iterable[str]:
    return [name for name, kind in LOGGER_TYPE_TO_CLASS.items() if kind.is_installed()]
