"""float32: nothing happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.amp import BFloat16Autocast
from acc_plugins.precisions.forward import surround_forward
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


@pytest.mark.parametrize("compiled", [False, True])
def test_what_an_earlier_runs_precision_did_is_taken_away(compiled: bool) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    expected = model(x)
    made: nn.Module = BFloat16Autocast("cpu").wrap(model)
    made = torch.compile(made, backend="eager") if compiled else made
    assert not torch.equal(made(x), expected)
    assert Precision().wrap(made) is made
    assert torch.equal(made(x), expected)
    assert type(model) is nn.Linear


def twice(forward: Any, /, *args: Any) -> Any:
    return 2 * forward(*args)


def test_what_the_user_did_around_a_forward_stays() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    expected = 2 * model(x)
    assert torch.equal(Precision().wrap(surround_forward(model, twice))(x), expected)


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
