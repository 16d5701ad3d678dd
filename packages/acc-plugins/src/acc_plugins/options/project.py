"""Where a project keeps its logs and checkpoints, and which checkpoints it keeps."""

from __future__ import annotations

import os
from dataclasses import dataclass

from acc_ops.options import OptionError, option
from acc_plugins.options.checks import require_at_least, settle


@dataclass(kw_only=True)
class CheckpointPolicy:
    """Which numbered checkpoints stay: each one that any of these rules names. The newest always does.

    Only whole ones count for `every`, `every_steps` and `best`. Raises OptionError (a ValueError) for a value that cannot be.
    """

    last: int = option(1, help="the newest ones, at least one")
    every: int | None = option(None, help="those whose number is a multiple of this: 0, k, 2 k, ...")
    every_steps: int | None = option(
        None, help="the first one at or after each multiple of so many steps (of `accelerator.step`)"
    )
    best: int = option(0, help="so many with the best metric that `save_state(metric=...)` was given")
    mode: str = option("min", choices=("min", "max"), help="whether a small or a large metric is good")

    def __post_init__(self) -> None:
        settle(self)
        for name, least in {"last": 1, "every": 1, "every_steps": 1, "best": 0}.items():
            require_at_least(self, name, least)


@dataclass
class ProjectConfiguration:
    """Folders and the naming of checkpoints. Raises OptionError (a ValueError) for a value that cannot be."""

    project_dir: str | None = option(None, help="the project's folder")
    logging_dir: str | None = option(None, help="the trackers' folder; none: the project's folder")
    automatic_checkpoint_naming: bool = option(
        False, help="number the checkpoints: PROJECT_DIR/checkpoints/checkpoint_0, checkpoint_1, ..."
    )
    total_limit: int | None = option(None, help="how many numbered checkpoints to keep; none: all")
    iteration: int = option(0, help="the number of the next checkpoint")
    save_on_each_node: bool = option(
        False, help="the first rank of every node writes, for nodes without a common disk"
    )
    keep: CheckpointPolicy | None = option(
        None, flag=False, key=False, help="which numbered checkpoints to keep, by more rules than total_limit"
    )

    def __post_init__(self) -> None:
        settle(self)
        if not isinstance(self.keep, (CheckpointPolicy, type(None))):
            raise OptionError(
                f"ProjectConfiguration.keep must be a CheckpointPolicy, got {self.keep!r}; a number is total_limit"
            )
        if self.keep is not None and self.total_limit is not None:
            raise OptionError(
                f"ProjectConfiguration: total_limit={self.total_limit} and keep={self.keep} both say what stays: "
                "give one (total_limit=n is keep=CheckpointPolicy(last=n))"
            )
        if self.keep is not None and not self.automatic_checkpoint_naming:
            raise OptionError(
                "ProjectConfiguration.keep has no effect without automatic_checkpoint_naming=True: only numbered checkpoints are deleted"
            )
        require_at_least(self, "total_limit", 1)
        require_at_least(self, "iteration", 0)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder; the logging folder follows when it has not been set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
