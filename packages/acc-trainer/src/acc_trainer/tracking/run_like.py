"""What Weights & Biases and the libraries that follow its interface have in common: init, Run.config, Run.log, Run.finish."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import number_of, plain


class RunTracker(GeneralTracker):
    """A run in the project `run_name` of the module called `name`; keyword arguments go to its `init`. `ImportError` without it."""

    counts_steps = True
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The library's run."""
        return self.run

    @property
    def library(self) -> Any:
        """The library's module."""
        return require(self.name, f"the tracker {self.name!r}", extra=f"acc-trainer[{self.name}]")

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self.run = self.library.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as the run's config."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Everything that the run's `log` takes; tensors of one element as numbers. Keyword arguments go to it."""
        self.run.log({str(key): number_of(value) for key, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists or batches of images under a name; keyword arguments go to the library's `Image`."""
        image = self.library.Image
        shown = {str(key): [image(one, **kwargs) for one in images] for key, images in values.items()}
        self.run.log(shown, step=step)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None


class TableRunTracker(RunTracker):
    """The same for a library with tables."""

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
        """A table given as columns and rows, or as a dataframe; keyword arguments go to the run's `log`."""
        table = self.library.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)
