"""How a checkpoint's files and folders are called. The specification's names, and ours beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from acc_plugins.states.whole import MANIFEST as MANIFEST
from acc_plugins.states.whole import CheckpointError as CheckpointError
from acc_plugins.states.whole import DoesNotFitError as DoesNotFitError

SCALER = "scaler.pt"
FOLDER = "checkpoints"  # of automatic naming, inside the project's folder
_AUTOMATIC = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")
OURS = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|(progress|gradients)_\d+\.bin"
    r"|pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin|(pytorch_model_fsdp|optimizer)_\d+/.+"
)  # the files that a checkpoint consists of


class NotWholeError(CheckpointError):
    """A checkpoint is incomplete, or has been changed: an older one may be taken instead."""


class ReplacedError(CheckpointError):
    """The folder is no longer what it was when a load chose it: another save has replaced or deleted it."""


class Project(Protocol):
    """What of the project's configuration decides where checkpoints go."""

    project_dir: str | None
    automatic_checkpoint_naming: bool
    total_limit: int | None
    iteration: int
    keep: Any  # a CheckpointPolicy or None


def numbered(kind: str, index: int) -> str:
    """`model`, `model_1`, `model_2`: the names of the objects of one kind, in the order of `prepare`."""
    return kind if index == 0 else f"{kind}_{index}"


def scheduler_file(index: int) -> str:
    return f"{numbered('scheduler', index)}.bin"


def loader_file(index: int) -> str:
    """The state of a stateful loader, for readers of the specification's files."""
    return f"{numbered('dl_state_dict', index)}.bin"


def sampler_file(index: int) -> str:
    return f"{numbered('sampler', index)}.bin"


def custom_file(index: int) -> str:
    return f"custom_checkpoint_{index}.pkl"


def random_file(rank: int) -> str:
    return f"random_states_{rank}.pkl"


def progress_file(rank: int) -> str:
    """Ours: the positions of the loaders and of the accumulation window of one rank."""
    return f"progress_{rank}.bin"


def gradients_file(rank: int) -> str:
    """Ours: the gradients of one rank inside an accumulation window."""
    return f"gradients_{rank}.bin"


def automatic_folder(project: Project) -> Path:
    """Where automatically named checkpoints lie. ValueError without a project folder."""
    if project.project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming needs a project_dir: ProjectConfiguration(project_dir=...)"
        )
    return Path(project.project_dir, FOLDER)


def automatic_name(number: int) -> str:
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """The number in an automatic name; None for any other name, `checkpoint_07` for one: names and numbers are one to one."""
    match = _AUTOMATIC.fullmatch(name)
    return int(match.group(1)) if match else None


def staging_of(target: Path) -> Path:
    """The folder in which the next content of `target` is written."""
    return target.with_name(f".{target.name}.writing")


def parked_of(target: Path) -> Path:
    """Where the content of `target` waits for a moment on file systems that cannot exchange two folders."""
    return target.with_name(f".{target.name}.old")


def removing_of(target: Path) -> Path:
    """What `target` is called while it is deleted."""
    return target.with_name(f".{target.name}.removing")


def lock_of(target: Path) -> Path:
    """The file that the run which saves into `target` holds: one for all automatic names of a folder, since each clears up after the others."""
    name = "checkpoint" if number_of(target.name) is not None else target.name
    return target.with_name(f".{name}.lock")


def class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
