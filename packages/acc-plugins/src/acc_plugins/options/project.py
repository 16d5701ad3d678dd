"""Where a project keeps its logs and checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass

from acc_ops.options import option
from acc_plugins.options.checks import require_at_least, settle


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

    def __post_init__(self) -> None:
        settle(self)
        require_at_least(self, "total_limit", 1)
        require_at_least(self, "iteration", 0)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder; the logging folder follows when it has not been set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
