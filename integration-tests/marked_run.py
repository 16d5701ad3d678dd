"""A run whose whole state is one number: whatever a checkpoint gives back must be of one save."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.project import ProjectConfiguration
from acc_plugins.strategies.clip import local_part
from acc_trainer.accelerator import Accelerator


class MarkedRun:
    """Two models, two optimizers, a schedule, a registered object and the random generators, all set to one mark.

    With `named` every save goes over the folder `FOLDER/latest`; else names are automatic, and one checkpoint stays.
    `sharded`: FSDP2 spreads models and optimizers over the ranks, and each writes its shards. `single`: one model and one optimizer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        named: bool,
        width: int = 8,
        background: bool = False,
        sharded: bool = False,
        single: bool = False,
    ) -> None:
        self.named, self.background = named, background
        self.target = str(folder / "latest") if named else None
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
            if sharded
            else None,
            project_config=ProjectConfiguration(
                project_dir=str(folder), automatic_checkpoint_naming=not named, total_limit=1
            ),
        )
        first = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        second = nn.Linear(width, 3)
        adam = torch.optim.Adam(first.parameters(), lr=0.0)
        momentum = torch.optim.SGD(second.parameters(), lr=0.0, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(momentum, lambda _: 1.0)
        for optimizer in (adam, momentum):  # its state exists from the first step on
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        pairs = [(second, momentum)] if single else [(first, adam), (second, momentum)]
        models, optimizers = zip(*pairs, strict=True)
        prepared = self.accelerator.prepare(*models, *optimizers, schedule)
        self.models, self.optimizers = prepared[: len(pairs)], prepared[len(pairs) : -1]
        self.schedule = prepared[-1]
        self.counter = _Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def mark(self, value: int) -> None:
        """Everything that a checkpoint holds becomes `value`."""
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(value)
        self.schedule.scheduler.last_epoch = self.counter.value = self.accelerator.step = value
        self.seed(value)

    def seed(self, value: int) -> None:
        """The random generators become `value`."""
        torch.manual_seed(self._seed(value))
        random.seed(self._seed(value))

    def value(self) -> int:
        """The mark that everything has. ValueError for a mixture."""
        found: dict[str, set[float]] = {
            "tensors": {float(x) for tensor in self._tensors() for x in (tensor.min(), tensor.max())},
            "schedule": {self.schedule.scheduler.last_epoch},
            "object": {self.counter.value},
            "step": {self.accelerator.step},
        }
        value = self.counter.value
        seed = torch.Generator().manual_seed(self._seed(value))
        ours = torch.equal(torch.get_rng_state(), seed.get_state())
        ours = ours and random.getstate() == random.Random(self._seed(value)).getstate()
        found["generators"] = {value if ours else float("nan")}
        if any(values != {value} for values in found.values()):
            raise ValueError(f"parts of several saves: {found}")
        return value

    def save(self) -> None:
        """Save and, where it is written in the background, wait for the end."""
        self.begin_save()
        if self.background:
            self.accelerator.wait_for_save()

    def begin_save(self) -> None:
        if self.background:
            self.accelerator.save_state(self.target, blocking=False)
        else:
            self.accelerator.save_state(self.target)

    def load(self) -> int:
        """Load the newest checkpoint; its mark."""
        self.accelerator.load_state(self.target)
        return self.value()

    def _tensors(self) -> list[torch.Tensor]:
        models = [model.state_dict().values() for model in self.models]
        states = [state for optimizer in self.optimizers for state in optimizer.optimizer.state.values()]
        inside = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        every = [*(tensor for values in models for tensor in values), *inside]
        own = [local_part(tensor.detach()) for tensor in every]
        return [tensor for tensor in own if tensor.numel()]

    def _seed(self, value: int) -> int:
        return 1000 * value + self.accelerator.process_index


class _Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def home(folder: Path, named: bool) -> Path:
    """Where the checkpoints of a run lie."""
    return folder if named else folder / "checkpoints"


def leftovers(folder: Path) -> list[str]:
    """What lies beside the checkpoints and is none."""
    return sorted(name for name in os.listdir(folder) if name.startswith("."))
