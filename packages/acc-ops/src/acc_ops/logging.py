"""Loggers that know the rank: one line per world unless every rank is asked to speak."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from acc_ops.environment import parse_choice_from_env
from acc_ops.world import current_world

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


_LEVEL_VARIABLE = "ACCELERATE_LOG_LEVEL"


class MultiProcessAdapter(_Adapter):
    """A logger of one world. Before a world is joined it logs as rank 0 of 1."""

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[Any] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the main rank; on every rank with `main_process_only=False`; on every rank in rank order with `in_order=True`.

        With `in_order` all ranks must call, whatever their level: there is a barrier after each rank's turn.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        speaks = self.isEnabledFor(level)
        if not in_order:
            # a line that nobody sees asks for no world
            if speaks and (not main_process_only or current_world().is_main):
                text, options = self.process(msg, kwargs)
                self.logger.log(level, text, *args, **options)
            return
        from acc_ops.collectives import barrier  # noqa: PLC0415 - most loggers never need the collectives

        world = current_world()
        for _ in range(world.rank):
            barrier(world)
        try:
            if speaks:
                text, options = self.process(msg, kwargs)
                self.logger.log(level, text, *args, **options)
        finally:  # a handler that raises must not keep the later ranks waiting
            for _ in range(world.rank, world.size):
                barrier(world)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The text with its rank in front, the `extra` of the adapter and of the call, and a `stacklevel` that names the caller's line."""
        kwargs.setdefault("stacklevel", 2)  # this adapter's log() is one frame between
        if self.extra:  # the standard library's adapter drops what the call gives
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return f"[RANK {current_world().rank}] {msg}", kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """`warning`, once in this logger's life for the same arguments on the same rank."""
        said = (current_world().rank, repr(args), repr(sorted(kwargs.items())))
        if said not in self._warned:
            self._warned.add(said)
            kwargs.setdefault("stacklevel", 3)
            self.log(logging.WARNING, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """The logger `name` with the rank in front of its lines.

    `log_level` (any case, or a number; else the variable ACCELERATE_LOG_LEVEL) is set on this logger alone, never on the root; with neither, levels are
    untouched. ValueError for an unknown level, saying where it came from.
    """
    logger = logging.getLogger(name)
    source = "log_level" if log_level else _LEVEL_VARIABLE
    given = log_level or parse_choice_from_env(_LEVEL_VARIABLE, "")
    level = given.strip().upper() if isinstance(given, str) else given
    if level:
        try:
            logger.setLevel(level)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{source}={given!r} is no log level: use debug, info, warning, error or critical"
            ) from error
    return MultiProcessAdapter(logger)
