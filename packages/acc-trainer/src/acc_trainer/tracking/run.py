"""The trackers of one Accelerator: started, fed and finished together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acc_ops.world import World
from acc_trainer.tracking.registry import LOGGER_TYPE_TO_CLASS, filter_trackers
from acc_trainer.tracking.tracker import GeneralTracker


class Trackers:
    """What `log_with` means, and the trackers that are running."""

    def __init__(self, log_with: list[Any], logging_dir: Any, world: World) -> None:
        self.logging_dir = logging_dir
        self.world = world
        self.log_with = filter_trackers(log_with, logging_dir)
        self.running: list[GeneralTracker] = []

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Start every tracker that this process takes part in; those of an earlier run are finished first."""
        self.finish()
        for one in self.log_with:
            tracker = one if isinstance(one, GeneralTracker) else self._made(one, project_name, init_kwargs)
            if tracker is not None:
                self.running.append(tracker)
        for tracker in self.running:
            if self._takes_part(tracker):
                tracker.start()
        if config is not None:
            for tracker in self.running:
                if self._takes_part(tracker):
                    tracker.store_init_configuration(dict(config))

    def _made(
        self, name: str, project_name: str, init_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> GeneralTracker | None:
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        if getattr(kind, "main_process_only", True) and not self.world.is_main:
            return None
        folder = (self.logging_dir,) if kind.requires_logging_directory else ()
        made: GeneralTracker = kind(project_name, *folder, **init_kwargs.get(name, {}))
        return made

    def _takes_part(self, tracker: GeneralTracker) -> bool:
        return self.world.is_main or not getattr(tracker, "main_process_only", True)

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Give `values` to every tracker."""
        for tracker in self.running:
            if self._takes_part(tracker):
                tracker.log(dict(values), step=step, **log_kwargs.get(tracker.name, {}))  # type: ignore[attr-defined]

    def get(self, name: str, unwrap: bool) -> Any:
        """The tracker called `name`; a blank one on processes that have none.

        Raises `ValueError` for a name that none of the running trackers has.
        """
        if not self.running:
            return GeneralTracker(_blank=True)
        for tracker in self.running:
            if tracker.name == name:  # type: ignore[attr-defined]
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = ", ".join(str(tracker.name) for tracker in self.running)  # type: ignore[attr-defined]
        raise ValueError(f"there is no tracker {name!r}: running are {names}")

    def finish(self) -> None:
        """Finish every tracker, also when one of them fails."""
        running, self.running = self.running, []
        errors: list[BaseException] = []
        for tracker in running:
            try:
                if self._takes_part(tracker):
                    tracker.finish()
            except Exception as error:  # noqa: BLE001 (any library's; raised below, after the others are closed)
                errors.append(error)
        if errors:
            raise errors[0]
