"""TensorBoard: scalars, texts and images in event files under the logging folder."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from acc_ops.optional import is_tensorboard_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process


class TensorBoardTracker(GeneralTracker):
    """A run of TensorBoard in `logging_dir`/`run_name`; keyword arguments go to `SummaryWriter`.

    Raises `ImportError` when neither tensorboard nor tensorboardX is installed.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(os.fspath(logging_dir), run_name)
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
        """The settings as hyperparameters, and as hparams.yml in a folder with the time in its name."""
        self.writer.add_hparams({key: _plain(value) for key, value in values.items()}, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        yaml = require("yaml", "writing the settings of a run")
        text = yaml.safe_dump({key: _plain(value) for key, value in values.items()})
        (folder / "hparams.yml").write_text(text, encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, strings as texts, dicts as groups of scalars; tensors of one element count as numbers."""
        for key, value in values.items():
            if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
                value = value.item()
            if isinstance(value, (int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                raise TypeError(
                    f"TensorBoard takes numbers, strings and dicts of numbers, but {key!r} is {type(value).__name__}: "
                    "use log_images for images"
                )
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, (N, 3, H, W) unless `dataformats` says otherwise."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)
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


def _plain(value: Any) -> Any:
    """What TensorBoard and YAML can both write."""
    return value if isinstance(value, (int, float, str, bool)) else str(value)
