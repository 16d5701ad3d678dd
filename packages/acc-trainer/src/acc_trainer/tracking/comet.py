"""Comet."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import is_comet_ml_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import flat, is_number, spread, table_rows


class CometMLTracker(GeneralTracker):
    """An experiment in the project `run_name`; keyword arguments go to `comet_ml.start`. Raises `ImportError` without comet-ml 3.43."""

    name = "comet_ml"
    requires_logging_directory = False
    library_available = staticmethod(is_comet_ml_available)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """Comet's experiment."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        comet = require("comet_ml", "the Comet tracker", extra="acc-trainer[comet_ml]", min_version="3.43")
        self.writer = comet.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as parameters, nested ones as `optimizer.lr`."""
        self.writer.log_parameters(flat(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, the rest as Comet's "other" values; keyword arguments go to the call that takes the value."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in spread(values).items():
            if is_number(value):
                self.writer.log_metric(key, value, step=step, **kwargs)
            else:
                self.writer.log_other(key, value, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists or batches of images under a name; keyword arguments go to `log_image`."""
        for key, images in values.items():
            for image in images:
                self.writer.log_image(image, name=str(key), step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table given as columns and rows, or as a dataframe; keyword arguments go to Comet's `log_table`."""
        if step is not None:
            self.writer.set_step(step)
        headers, rows = table_rows(columns, data, dataframe)
        file = table_name if "." in table_name else f"{table_name}.csv"
        self.writer.log_table(file, tabular_data=rows, headers=headers or False, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        if self.writer is not None:
            self.writer.end()
            self.writer = None
