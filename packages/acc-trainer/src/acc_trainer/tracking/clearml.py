"""ClearML."""

from __future__ import annotations

from typing import Any

from acc_ops.environment import parse_choice_from_env
from acc_ops.optional import is_clearml_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import is_number, plain, spread, table_rows

_SERIES = ("eval", "test", "train")  # what a name may begin with, to be drawn in one plot with the others


class ClearMLTracker(GeneralTracker):
    """The task that is running, or a new one in the project `run_name`; keyword arguments go to `Task.init`.

    CLEARML_PROJECT and CLEARML_TASK name project and task. A task that was running before is not closed. `ImportError` without clearml.
    """

    name = "clearml"
    requires_logging_directory = False
    library_available = staticmethod(is_clearml_available)

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._is_ours = False

    @property
    def tracker(self) -> Any:
        """ClearML's task."""
        return self.task

    @on_main_process
    def start(self) -> None:
        """Take the running task, or begin one."""
        task = require("clearml", "the ClearML tracker", extra="acc-trainer[clearml]").Task
        self.task = task.current_task()
        self._is_ours = self.task is None
        if self._is_ours:
            names = {
                "project_name": parse_choice_from_env("CLEARML_PROJECT", "") or self.user_provided_run_name,
                "task_name": parse_choice_from_env("CLEARML_TASK", "") or self.user_provided_run_name,
            }
            self.task = task.init(**{**names, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as the task's configuration."""
        self.task.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers: without a step as single values, else as points of a curve (`train_loss` and `eval_loss` in one plot)."""
        report = self.task.get_logger()
        for key, value in spread(values).items():
            if not is_number(value):
                self.leave_out(key, f"it shows numbers, got {type(value).__name__}")
            elif step is None:
                report.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = self._get_title_series(key)
                report.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """An image under a name, as an array; keyword arguments go to `report_image`."""
        report = self.task.get_logger()
        for key, value in values.items():
            title, series = self._get_title_series(str(key))
            report.report_image(title=title, series=series, iteration=step, image=value, **kwargs)

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
        """A table given as columns and rows, or as a dataframe; keyword arguments go to `report_table`."""
        shown = dataframe
        if dataframe is None:
            headers, rows = table_rows(columns, data, None)
            shown = rows if headers is None else [headers, *rows]
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=shown, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task, if it was begun here."""
        if self.task is not None and self._is_ours:
            self.task.close()
        self.task = None

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        """The plot and the curve in it: `eval_loss` is the curve "eval" of the plot "loss"."""
        for series in _SERIES:
            if name.startswith(f"{series}_"):
                return name[len(series) + 1 :], series
        return name, "train"
