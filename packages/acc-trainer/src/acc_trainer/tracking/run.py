"""The trackers of one Accelerator: started, fed and finished together, on rank 0.

[Note: a tracker that fails] What a script does wrong raises: unknown names everywhere, wrong arguments (TypeError, ValueError, ImportError)
while a tracker starts, when nothing has been lost yet, and a TypeError later on. Any other failure of a tracker (network, full disk) is said and
does not end the training: one that cannot start is left out of this run; values that it could not take are lost and it is tried again with the
next ones; after several failures in a row it is left out. What was lost is said at the end.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from acc_ops.world import World

if TYPE_CHECKING:
    from acc_trainer.tracking.tracker import GeneralTracker

logger = logging.getLogger(__name__)
_MOST_FAILURES = 3  # in a row
_NO_KWARGS: Mapping[str, Any] = {}


@dataclass
class Running:
    """A tracker and how it fares."""

    tracker: GeneralTracker
    name: str
    in_a_row: int = 0  # failures
    lost: int = 0  # calls whose values did not arrive
    closed: bool = False  # left out for the rest of the run


class Trackers:
    """What `log_with` means, and the trackers that are running."""

    def __init__(self, log_with: list[Any], logging_dir: Any, world: World) -> None:
        """Raises what `filter_trackers` raises, on every rank."""
        self.logging_dir = logging_dir
        self.world = world
        self.log_with: list[str | GeneralTracker] = []
        self._running: list[Running] = []
        self._begun = False
        self._told = False  # that values go nowhere
        self._count = 0  # the step of a `log` without one, where a tracker counts for itself
        self._goes_on = False  # whether a checkpoint was loaded, so that such a tracker is told
        if log_with:
            # a lazy start: the files of all trackers are read only where some are wanted
            from acc_trainer.tracking.registry import filter_trackers  # noqa: PLC0415

            self.log_with = filter_trackers(log_with, logging_dir)

    @property
    def running(self) -> list[GeneralTracker]:
        """Those that have started and were not left out; none on other ranks than 0."""
        return [one.tracker for one in self._running if not one.closed]

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Start every tracker on rank 0; those of an earlier run are finished first.

        Raises, on every rank, `TypeError` for a config that is no mapping and `ValueError` for `init_kwargs` of an unknown tracker.
        """
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"init_trackers takes the settings as a dict, got {config!r:.200}")
        self._check_names("init_kwargs", init_kwargs)
        self.finish()
        self._begun = True
        if not self.world.is_main:
            return
        try:
            for one in self.log_with:
                self._start_one(one, project_name, config, init_kwargs)
        except BaseException:
            self.finish()  # nothing of a run that did not begin stays open
            raise

    def _start_one(
        self,
        one: str | GeneralTracker,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        name = one if isinstance(one, str) else _name(one)
        wrong_use = (TypeError, ValueError, ImportError)
        made: list[GeneralTracker] = []

        def begin() -> None:
            tracker = one if not isinstance(one, str) else self._made(one, project_name, init_kwargs)
            tracker.start()
            made.append(tracker)

        if not isinstance(one, str) and init_kwargs.get(name):
            logger.warning("init_kwargs[%r] has no effect: log_with has that tracker already made", name)
        error = _failure_of(begin, wrong_use)
        if error is not None:
            logger.error(
                "tracker %r could not start and is left out of this run: %s",
                name,
                _told(error),
                exc_info=error,
            )
            return
        running = Running(made[0], name)
        self._running.append(running)
        if config is not None:
            self._try(
                running, "the settings", lambda: made[0].store_init_configuration(dict(config)), wrong_use
            )

    def _made(
        self, name: str, project_name: str, init_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> GeneralTracker:
        from acc_trainer.tracking.registry import LOGGER_TYPE_TO_CLASS  # noqa: PLC0415  as in __init__

        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        folder = (self.logging_dir,) if kind.requires_logging_directory else ()
        made: GeneralTracker = kind(project_name, *folder, **init_kwargs.get(name, {}))
        return made

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Give `values` to every tracker.

        Raises, on every rank, `TypeError` for values that are no mapping and a step that is no whole number, `ValueError` for `log_kwargs` of an
        unknown tracker.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f'log takes a dict of values by name, such as {{"loss": 0.5}}, got {values!r:.200}'
            )
        if step is not None:
            step = _whole(step)
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        if self.log_with and not (self._begun or self._told):
            self._told = True
            logger.warning(
                "log has no effect: no tracker of log_with is running; call init_trackers first (end_training ends them)"
            )
        for one in self._running:
            if one.closed:
                one.lost += 1
                continue
            kwargs = log_kwargs.get(one.name, _NO_KWARGS)
            what = "values" if step is None else f"the values of step {step}"
            shown = self._count if step is None and self._goes_on and one.tracker.counts_steps else step
            self._try(one, what, partial(one.tracker.log, dict(values), step=shown, **kwargs))
        self._count = (self._count if step is None else step) + 1

    def state_dict(self) -> dict[str, int]:
        """The step that comes next, for a checkpoint."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the steps of the saved run; before or after `start`."""
        self._count, self._goes_on = int(state["count"]), True

    def _try(
        self,
        one: Running,
        what: str,
        call: Callable[[], None],
        wrong_use: tuple[type[Exception], ...] = (TypeError,),
    ) -> None:
        error = _failure_of(call, wrong_use)
        if error is None:
            one.in_a_row = 0
            return
        one.lost += 1
        one.in_a_row += 1
        if one.lost == 1:
            logger.warning(
                "tracker %r failed and %s are lost; it is tried again: %s", one.name, what, _told(error)
            )
        if one.in_a_row >= _MOST_FAILURES:
            one.closed = True
            logger.error(
                "tracker %r failed %d times in a row and is left out from here on: %s",
                one.name,
                one.in_a_row,
                _told(error),
            )

    def get(self, name: str, unwrap: bool) -> Any:
        """The tracker called `name`; on ranks that have none, and for one that failed, a blank one that takes every call.

        Raises `ValueError`, on every rank, for a name that none of the trackers of this run has.
        """
        from acc_trainer.tracking.tracker import BlankTracker  # noqa: PLC0415  as in __init__

        for one in self._running:
            if one.name == name and not one.closed:
                return one.tracker.tracker if unwrap else one.tracker  # type: ignore[attr-defined]
        names = [one if isinstance(one, str) else _name(one) for one in self.log_with]
        if names and name not in names:
            raise ValueError(f"there is no tracker {name!r}: log_with has {', '.join(names)}")
        return BlankTracker(name)

    def finish(self) -> None:
        """Finish every tracker, also when one of them fails, and say what was lost."""
        running, self._running = self._running, []
        if self._begun:
            self._begun = self._goes_on = False
            self._count = 0
        for one in running:
            error = _failure_of(one.tracker.finish, ())
            if error is not None:
                logger.error(
                    "tracker %r failed while it finished, its last values may be lost: %s",
                    one.name,
                    _told(error),
                )
            if one.lost:
                logger.warning("tracker %r did not get %d of the calls of this run", one.name, one.lost)

    def _check_names(self, argument: str, given: Iterable[str]) -> None:
        if not given:
            return
        from acc_trainer.tracking.registry import LOGGER_TYPE_TO_CLASS  # noqa: PLC0415  as in __init__

        known = {*LOGGER_TYPE_TO_CLASS, *(_name(one) for one in self.log_with if not isinstance(one, str))}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{argument} names {unknown[0]!r}, which is no tracker: there are {', '.join(sorted(known))}"
            )


def _failure_of(call: Callable[[], None], wrong_use: tuple[type[Exception], ...]) -> Exception | None:
    """What `call` raised, where it is the tracker's failure; what the script did wrong is raised on."""
    try:
        call()
    except wrong_use:
        raise
    except Exception as error:  # noqa: BLE001  any library's; see the note
        return error
    return None


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"the step of log must be a whole number or None, got {step!r:.200}") from None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _name(tracker: GeneralTracker) -> str:
    return str(tracker.name)
