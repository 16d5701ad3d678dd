"""Dummy optimizers and schedulers, and DeepSpeed's optimizer for one of torch's; the library's constructors are recorded."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acc_plugins import DummyOptim, DummyScheduler, map_pytorch_optim_to_deepspeed
from acc_plugins.options import deepspeed_stand_ins


def test_dummies_hold_what_they_were_given() -> None:
    optimizer = DummyOptim([1], weight_decay=0.1, betas=(0.1, 0.2))
    assert vars(optimizer) == {
        "params": [1],
        "lr": 0.001,
        "weight_decay": 0.1,
        "kwargs": {"betas": (0.1, 0.2)},
    }
    scheduler = DummyScheduler(optimizer, 10, lr_scheduler_callable=len, last=1)
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == (optimizer, 10, 0)
    assert (scheduler.lr_scheduler_callable, scheduler.kwargs) == (len, {"last": 1})


class Recorder:
    """Stands for a module of DeepSpeed: a call of any name tells itself and its arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda groups, **given: SimpleNamespace(name=name, groups=groups, given=given)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_stand_ins, "require", lambda _name, _purpose, extra: Recorder())


WEIGHT = nn.Parameter(torch.zeros(2))


class Lion8bit(torch.optim.SGD):
    """A family is known by its name, here of a library that is not installed."""


@pytest.mark.parametrize(
    ("optimizer", "name", "given"),
    [
        (
            torch.optim.Adam([WEIGHT], lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4),
            "DeepSpeedCPUAdam",
            {"adamw_mode": False, "lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3, "weight_decay": 0.4},
        ),
        (
            torch.optim.AdamW([WEIGHT], lr=0.5, weight_decay=0.4),
            "DeepSpeedCPUAdam",
            {"adamw_mode": True, "lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.4},
        ),
        (
            torch.optim.Adagrad([WEIGHT], lr=0.5),
            "DeepSpeedCPUAdagrad",
            {"lr": 0.5, "eps": 1e-10, "weight_decay": 0},
        ),
        (Lion8bit([WEIGHT], lr=0.5, weight_decay=0.1), "DeepSpeedCPULion", {"lr": 0.5, "weight_decay": 0.1}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.optim.Optimizer) else "",
)
def test_each_family_has_its_twin_with_the_same_settings(
    library: None, optimizer: torch.optim.Optimizer, name: str, given: dict[str, Any]
) -> None:
    made = map_pytorch_optim_to_deepspeed(optimizer)
    assert (made.name, made.given) == (name, given)
    assert made.groups is optimizer.param_groups


def test_a_subclass_is_of_its_parents_family(library: None) -> None:
    class Own(torch.optim.AdamW):
        pass

    assert map_pytorch_optim_to_deepspeed(Own([WEIGHT])).given["adamw_mode"] is True


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD([WEIGHT], lr=1), "no CPU optimizer for SGD"),
        (torch.optim.NAdam([WEIGHT]), "no CPU optimizer for NAdam"),
        (torch.optim.Adam([{"params": [WEIGHT], "amsgrad": True}]), "amsgrad=True of Adam has no equal"),
        (torch.optim.Adagrad([WEIGHT], lr_decay=0.1), "lr_decay=0.1 of Adagrad"),
    ],
    ids=["SGD", "NAdam", "amsgrad", "lr_decay"],
)
def test_what_has_no_twin_is_refused(library: None, optimizer: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        map_pytorch_optim_to_deepspeed(optimizer)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="offloading Adam to CPU memory needs deepspeed"):
        map_pytorch_optim_to_deepspeed(torch.optim.Adam([WEIGHT]))
