"""TensorBoard: scalars, texts and images in event files under the logging folder."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from acc_ops.optional import is_tensorboard_available, require
from acc_trainer.tracking.run_files import path_inside
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import flat, is_number, number_of, plain


class TensorBoardTracker(GeneralTracker):
    """A run of TensorBoard in `logging_dir`/`run_name`; keyword arguments go to `SummaryWriter`.

    Raises `ImportError` when neither tensorboard nor tensorboardX is installed, `ValueError` for a name that leads out of the folder.
    """

    name = "tensorboard"
    requires_logging_directory = True
    library_available = staticmethod(is_tensorboard_available)

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.fspath(path_inside(logging_dir, run_name))
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        self.writer = _summary_writer()(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as hyperparameters, nested ones as `optimizer.lr`, and as hparams.yml in a folder with the time in its name."""
        shown = {
            key: value if isinstance(value, (int, float, str)) else str(value)
            for key, value in flat(values).items()
        }
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        yaml = require("yaml", "writing the settings of a run")
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain(values)), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, strings as texts, dicts as groups of scalars; tensors of one element count as numbers."""
        for name, given in values.items():
            key, value = str(name), number_of(given)
            if is_number(value):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                group = {str(part): number_of(one) for part, one in value.items()}
                self.writer.add_scalars(key, group, global_step=step, **kwargs)
            else:
                self.leave_out(
                    key, f"it shows numbers, texts and dicts of numbers, got {type(value).__name__}"
                )
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, (N, 3, H, W) unless `dataformats` says otherwise."""
        for key, images in values.items():
            self.writer.add_images(str(key), images, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()


def _summary_writer() -> Any:
    """torch's writer where tensorboard is installed, else tensorboardX's."""
    if is_tensorboard_available():
        try:
            return importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:  # only tensorboardX is there
            return require("tensorboardX", "the TensorBoard tracker").SummaryWriter
    return require("tensorboard", "the TensorBoard tracker")
