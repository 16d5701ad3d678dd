"""Aim: runs in a local repository."""

from __future__ import annotations

import os
from typing import Any

from acc_ops.optional import is_aim_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import is_number, plain, spread


class AimTracker(GeneralTracker):
    """A run called `run_name` in the repository `logging_dir`; keyword arguments go to `aim.Run`. Raises `ImportError` without aim 3."""

    name = "aim"
    requires_logging_directory = True
    library_available = staticmethod(is_aim_available)

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = None if logging_dir is None else os.fspath(logging_dir)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self.writer = _aim().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as `hparams`."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as curves, strings as texts, Aim's own objects as they are; keyword arguments go to `Run.track`."""
        for key, given in spread(values).items():
            value = _aim().Text(given) if isinstance(given, str) else given
            if is_number(value) or type(value).__module__.partition(".")[0] == "aim":
                self.writer.track(value, name=key, step=step, **kwargs)
            else:
                self.leave_out(key, f"it shows numbers, texts and Aim's objects, got {type(value).__name__}")

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """An image, or (image, caption), under a name; `kwargs["aim_image"]` go to `aim.Image`, `kwargs["track"]` to `Run.track`."""
        options = kwargs or {}
        image = _aim().Image
        for key, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            made = image(picture, caption=caption, **options.get("aim_image", {}))
            self.writer.track(made, name=str(key), step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _aim() -> Any:
    return require("aim", "the Aim tracker", extra="acc-trainer[aim]")
