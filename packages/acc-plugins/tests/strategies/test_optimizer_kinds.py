"""Optimizers that pieces of weights, or DTensors, are nothing for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from acc_plugins.strategies.optimizer_kinds import check_for_dtensors, check_for_pieces

_TORCHS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
_WHOLE = {"Adafactor", "LBFGS", "Muon"}
_WITH_A_WARNING = {"SparseAdam"}


def made(name: str) -> Any:
    return getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], lr=0.1)


@pytest.mark.parametrize("name", _TORCHS)
def test_every_optimizer_of_torch_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = made(name)
    if name in _WHOLE:
        with pytest.raises(ValueError, match=rf"{name} .*fsdp_version=2"):
            check_for_pieces([optimizer])
    else:
        with caplog.at_level(logging.WARNING):
            check_for_pieces([optimizer])
        assert bool(caplog.records) == (name in _WITH_A_WARNING)


def test_a_subclass_is_its_base_unless_it_steps_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(torch.optim.SGD):
        pass

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Adafactor(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    check_for_pieces([Mine([nn.Parameter(torch.ones(1))], lr=0.1)])
    assert not caplog.records
    check_for_pieces([Other([nn.Parameter(torch.ones(1))], lr=0.1)])
    assert "Other is not known here" in caplog.text
    with pytest.raises(ValueError, match="keeps means of rows and columns"):
        check_for_pieces([Adafactor([nn.Parameter(torch.ones(1))], lr=0.1)])


def test_what_torch_lacks_for_dtensors_is_refused() -> None:
    check_for_dtensors([made("AdamW"), made("LBFGS")])
    for name in ("Rprop", "Adafactor"):
        if hasattr(torch.optim, name):
            with pytest.raises(ValueError, match=f"torch's {name} does not run on DTensors"):
                check_for_dtensors([made(name)])
