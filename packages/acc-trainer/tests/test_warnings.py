"""Warnings name the line of the script, not one of ours, at whatever depth they are given."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import acc_trainer
from acc_plugins import ProjectConfiguration, TorchTensorParallelPlugin
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState


@pytest.fixture(autouse=True)
def a_new_run():
    yield
    AcceleratorState._reset_state(True)


def _run(folder: Path | None = None) -> Any:
    project = ProjectConfiguration(
        None if folder is None else str(folder), automatic_checkpoint_naming=folder is not None
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 1))
    return accelerator


def _keyword_without_effect(folder: Path) -> None:
    _run().save_state(folder / "a", tag="last")


def _folder_without_effect(folder: Path) -> None:
    _run(folder).save_state("elsewhere")


def _metric_that_is_none(folder: Path) -> None:
    _run().save_state(folder / "a", metric=float("nan"))


def _checkpoint_of_others(folder: Path) -> None:
    accelerator = _run()
    accelerator.save_state(folder / "a")
    os.remove(folder / "a" / "manifest.json")
    accelerator.load_state(folder / "a")


def _what_is_missing(folder: Path) -> None:
    accelerator = _run()
    accelerator.save_state(folder / "a")
    os.remove(folder / "a" / "manifest.json")
    os.remove(folder / "a" / "random_states_0.pkl")
    accelerator.load_state(folder / "a")


def _newer_than_the_named_one(folder: Path) -> None:
    accelerator = _run(folder)
    for step in range(2):
        accelerator.step = step
        accelerator.save_state()
    accelerator.load_state(folder / "checkpoints" / "checkpoint_0")


def _newest_is_not_whole(folder: Path) -> None:
    accelerator = _run(folder)
    accelerator.save_state()
    accelerator.save_state()
    os.remove(folder / "checkpoints" / "checkpoint_1" / "model.safetensors")
    accelerator.load_state()


def _bytes_that_changed(folder: Path) -> None:
    accelerator = _run(folder)
    accelerator.save_state()
    accelerator.save_state()
    file = folder / "checkpoints" / "checkpoint_1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    accelerator.load_state(checksums=True)


def _old_plugin(folder: Path) -> None:
    Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=1))


@pytest.mark.parametrize(
    "does",
    [
        _keyword_without_effect,
        _folder_without_effect,
        _metric_that_is_none,
        _checkpoint_of_others,
        _what_is_missing,
        _newer_than_the_named_one,
        _newest_is_not_whole,
        _bytes_that_changed,
        _old_plugin,
    ],
)
def test_a_warning_names_the_script(does: Callable[[Path], None], tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        does(tmp_path)
    assert caught
    assert {Path(one.filename).name for one in caught} == {Path(__file__).name}


def test_nobody_counts_the_frames_to_the_script_by_hand() -> None:
    """A count is wrong as soon as a function is called from elsewhere: `warn_caller` looks for the script."""
    (package,) = acc_trainer.__path__
    counted = [path.name for path in Path(package).rglob("*.py") if "stacklevel" in path.read_text("utf-8")]
    assert counted == []
