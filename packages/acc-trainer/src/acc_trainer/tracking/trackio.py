"""Trackio."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import is_trackio_available
from acc_trainer.tracking.run_like import TableRunTracker
from acc_trainer.tracking.tracker import on_main_process


class TrackioTracker(TableRunTracker):
    """A run in the project `run_name`; keyword arguments go to `trackio.init`. Raises `ImportError` without trackio.

    Trackio writes the settings together with the first values.
    """

    name = "trackio"
    library_available = staticmethod(is_trackio_available)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists or batches of images under a name, `name/0`, `name/1` and so on, since Trackio shows one image a name."""
        image = self.library.Image
        shown = {
            f"{key}/{number}": image(one, **kwargs)
            for key, images in values.items()
            for number, one in enumerate(images)
        }
        self.run.log(shown, step=step)
