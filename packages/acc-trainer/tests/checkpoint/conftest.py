"""A small run to save and load: what the Accelerator gives the checkpoint, without the rest of it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from acc_ops.world import current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Strategy
from acc_trainer.data.position import LoaderPosition
from acc_trainer.grad_sync import GradSync


class Counter:
    """A registered object; `fail` makes its state impossible to get."""

    def __init__(self, value=0):
        self.value = value
        self.fail = None

    def state_dict(self):
        if self.fail is not None:
            raise self.fail
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build_run(folder=None, *, seed=0, models=1, limit=None, keep=None, custom=1):
    """A run in the current world; one that has made one optimizer step, so that there is state."""
    world = current_world()
    precision = Precision()
    own = torch.Generator().manual_seed(seed)  # ranks that are threads share torch's own generator
    nets = [torch.nn.Linear(2, 3) for _ in range(models)]
    for parameter in [p for net in nets for p in net.parameters()]:
        torch.nn.init.normal_(parameter, generator=own)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    run = SimpleNamespace(
        world=world,
        precision=precision,
        strategy=Strategy(world, precision),
        grad_sync=GradSync(4),
        step=0,
        project_configuration=SimpleNamespace(
            project_dir=None if folder is None else str(folder),
            automatic_checkpoint_naming=folder is not None,
            total_limit=limit,
            keep=keep,
            iteration=0,
        ),
        _models=nets,
        _optimizers=optimizers,
        _schedulers=schedulers,
        _dataloaders=[SimpleNamespace(position=LoaderPosition(seed=5))],
        _custom_objects=[Counter() for _ in range(custom)],
        _save_model_state_pre_hook={},
        _load_model_state_pre_hook={},
        _background=None,
    )
    advance(run)
    return run


def advance(run):
    """One training step that changes everything a checkpoint holds."""
    for net, optimizer, scheduler in zip(run._models, run._optimizers, run._schedulers, strict=True):
        net(torch.linspace(-1, 1 + run.step, 8).view(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    run.step += 1
    run.grad_sync.advance()
    run._dataloaders[0].position.batches += 1
    for custom in run._custom_objects:
        custom.value += 1
    random.random()


def picture(run):
    """Everything that must be the same after loading, comparable by ==."""
    return {
        "weights": [[p.tolist() for p in net.parameters()] for net in run._models],
        "optimizers": [
            [
                [v.tolist() if torch.is_tensor(v) else v for v in entry.values()]
                for entry in o.state_dict()["state"].values()
            ]
            for o in run._optimizers
        ],
        "rates": [scheduler.get_last_lr() for scheduler in run._schedulers],
        "step": run.step,
        "window": run.grad_sync.state_dict(),
        "batches": run._dataloaders[0].position.state_dict()["batches"],
        "custom": [custom.value for custom in run._custom_objects],
    }


@pytest.fixture
def runs():
    """The helpers above: test files import nothing from each other."""
    return SimpleNamespace(build=build_run, advance=advance, picture=picture)
