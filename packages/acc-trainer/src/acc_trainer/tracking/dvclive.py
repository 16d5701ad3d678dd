"""DVCLive."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import is_dvclive_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import is_number, plain, spread


class DVCLiveTracker(GeneralTracker):
    """The `live` given, or a new `dvclive.Live` with the keyword arguments. Raises `ImportError` without dvclive."""

    name = "dvclive"
    counts_steps = True
    requires_logging_directory = False
    library_available = staticmethod(is_dvclive_available)

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Begin, unless a `live` was given."""
        if self.live is None:
            dvclive = require("dvclive", "the DVCLive tracker", extra="acc-trainer[dvclive]")
            self.live = dvclive.Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as parameters."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts as metrics of one step; keyword arguments go to `log_metric`."""
        if step is not None:
            self.live.step = step
        for key, value in spread(values).items():
            if is_number(value) or isinstance(value, str):
                self.live.log_metric(key, value, **kwargs)
            else:
                self.leave_out(key, f"it shows numbers and texts, got {type(value).__name__}")
        self.live.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """An image, or a path to one, under a name; keyword arguments go to `log_image`."""
        if step is not None:
            self.live.step = step
        for key, value in values.items():
            self.live.log_image(str(key) if "." in str(key) else f"{key}.png", value, **kwargs)

    @on_main_process
    def log_artifact(self, path: str, **kwargs: Any) -> None:
        """A file or folder; keyword arguments go to the Live's `log_artifact`."""
        self.live.log_artifact(path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End, also a `live` that was given."""
        if self.live is not None:
            self.live.end()
