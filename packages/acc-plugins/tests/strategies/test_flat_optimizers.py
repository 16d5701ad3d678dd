"""Optimizers follow into flat parameters, or nothing is changed and they are told why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.comm import SoloComm
from acc_plugins.strategies.flat_optimizers import ParameterPlaces


def _flattened(model: nn.Sequential, *layers: int, shown: bool = False) -> tuple[Any, nn.Parameter]:
    """What FSDP makes of some layers, as far as it is looked at: the unit, and its flat parameter."""
    flat: Any = nn.Parameter(torch.zeros(3))
    flat._param_infos = [
        SimpleNamespace(module=model[i], param_name=name) for i in layers for name in ("weight", "bias")
    ]
    flat._params = [] if shown else None
    return SimpleNamespace(_handle=SimpleNamespace(flat_param=flat)), flat


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))


def test_a_flat_parameter_stands_once_in_the_first_group_that_had_a_part_of_it() -> None:
    model = _model()
    places = ParameterPlaces([model])
    optimizer: Any = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    (first, flat), (second, other) = _flattened(model, 0, 1), _flattened(model, 2)
    places.move([optimizer], [first, second], SoloComm())
    assert [group["params"] for group in optimizer.param_groups] == [[flat], [], [], [], [other], []]


def test_parameters_that_stay_visible_and_those_of_other_models_stay() -> None:
    model, stranger = _model(), nn.Linear(1, 1)
    places = ParameterPlaces([model])
    before = [*model.parameters(), *stranger.parameters()]
    optimizer: Any = torch.optim.SGD(before, lr=0.1)
    places.move([optimizer], [_flattened(model, 0, 1, 2, shown=True)[0]], SoloComm())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    unit, flat = _flattened(model, 0, 1, 2)
    places.move([optimizer], [unit], SoloComm())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(flat), *map(id, stranger.parameters())]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda m: [{"params": m[0].parameters()}], "trains 0.weight but not 1.weight.*use_orig_params=True"),
        (
            lambda m: [{"params": m[0].parameters()}, {"params": m[1].parameters(), "momentum": 0.5}],
            r"0.weight with momentum=0 and 1.weight with momentum=0.5.*use_orig_params=True",
        ),
    ],
)
def test_what_one_parameter_cannot_be_is_an_error_and_no_optimizer_is_changed(groups: Any, said: str) -> None:
    model = _model()
    places = ParameterPlaces([model])
    good: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    bad: Any = torch.optim.SGD(groups(model), lr=0.1)
    before = [list(group["params"]) for o in (good, bad) for group in o.param_groups]
    flat = [[*model[0].parameters(), *model[1].parameters()]]
    with pytest.raises(ValueError, match=said):
        places.check([good, bad], flat, True, SoloComm())
    places.check([good, bad], flat, False, SoloComm())  # the originals stay
    after = [group["params"] for o in (good, bad) for group in o.param_groups]
    assert [[id(p) for p in group] for group in after] == [[id(p) for p in group] for group in before]


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer: Any = torch.optim.Adam(model.parameters())
    model(torch.tensor([[1.0, 2.0]])).sum().square().backward()
    optimizer.step()
    for merged in (True, False):
        with pytest.raises(ValueError, match=r"Adam has state for 0\.weight already"):
            ParameterPlaces([model]).check([optimizer], [list(model.parameters())], merged, SoloComm())


def test_state_that_is_still_what_construction_made_is_made_again_in_the_new_shape() -> None:
    for shown in (False, True):
        model = _model()
        places = ParameterPlaces([model])
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)
        unit, flat = _flattened(model, 0, 1, 2, shown=shown)
        for p in model.parameters():
            p.data = torch.zeros(2, dtype=torch.float64)  # what torch does to parameters that stay visible
        places.move([optimizer], [unit], SoloComm())
        trained = list(model.parameters()) if shown else [flat]
        assert set(optimizer.state) == set(trained)
        for p in trained:
            assert torch.equal(optimizer.state[p]["sum"], torch.full_like(p, 0.25, dtype=torch.float32))
            assert optimizer.state[p]["step"].shape == ()
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.testing.assert_close(trained[0].detach(), torch.full_like(trained[0], -0.1 / 1.25**0.5))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["sum"].add_(1),  # differs from the other parameters of the flat one
        lambda state: state["step"].add_(1),
        lambda state: state.update(sum=torch.tensor([[1.0, 2.0]])),
        lambda state: state.update(sum=state["sum"].to("meta")),
        lambda state: state.update(history=[1.0]),
    ],
)
def test_state_that_one_number_does_not_tell_is_refused_and_nothing_is_changed(change: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    places = ParameterPlaces([model])
    optimizer: Any = torch.optim.Adagrad(model.parameters())
    change(optimizer.state[model[0].weight])
    before = {id(p): dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(ValueError, match=r"Adagrad has state for 0\.(weight|bias) already"):
        places.check([optimizer], [list(model.parameters())], True, SoloComm())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(before)
    assert all(
        state[name] is value for p, state in optimizer.state.items() for name, value in before[id(p)].items()
    )
