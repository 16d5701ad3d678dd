"""float32: nothing happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.testing import PrecisionContract


class TestFloat32(PrecisionContract):
    tolerance = 0.0

    def make_precision(self) -> Precision:
        return Precision()


def test_nothing_is_touched() -> None:
    precision, model, loss = Precision(), nn.Linear(1, 1), torch.ones(())
    assert precision.wrap(model) is model
    assert type(model) is nn.Linear
    assert "forward" not in vars(model)
    assert precision.scale(loss) is loss
    with precision.context(enabled=False):
        assert model(torch.ones(1, 1)).dtype == torch.float32


def test_step_hands_the_closure_and_its_result_through() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(1)
    assert Precision().step(optimizer) == StepOutcome(True, None)
    assert Precision().step(optimizer, lambda: 3.5) == StepOutcome(True, 3.5)


def test_a_scalers_state_is_not_swallowed() -> None:
    Precision().load_state_dict({})
    with pytest.raises(ValueError, match="fp16"):
        Precision().load_state_dict({"scale": 1.0})
