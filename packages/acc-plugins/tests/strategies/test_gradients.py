"""Gradients are taken from wherever they lie and given back as they were; over several ranks in integration-tests/test_sharded_resume.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from acc_ops.world import current_world
from acc_plugins import Precision, UnsupportedError
from acc_plugins.strategies import gradients
from acc_plugins.strategies.strategy import Bundle, Strategy


def test_a_strategy_says_where_the_gradients_of_each_parameter_lie() -> None:
    strategy = Strategy(current_world(), Precision())
    (model,) = strategy.prepare(Bundle(models=[nn.Linear(2, 3)])).models
    places = strategy.gradient_places(model)
    assert list(places) == ["weight", "bias"]
    assert places["bias"].parameters == (model.bias,)
    assert places["weight"].take() is None
    places["weight"].give(torch.ones(3, 2))
    kept = model.weight.grad
    places["weight"].give(torch.full((3, 2), 2.0))
    assert model.weight.grad is kept  # it may be a view of a bucket
    assert kept.tolist() == [[2.0, 2.0]] * 3
    places["weight"].give(None)
    assert model.weight.grad is None
    assert places["weight"].misfit(torch.ones(3, 2)) is None
    assert places["weight"].misfit(torch.ones(2, 3)) == "one of shape (3, 2)"


def test_what_is_given_is_a_copy() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    saved = torch.ones(2)
    gradients.OfParameter(parameter).give(saved)
    saved.zero_()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")], ids=str)
def test_a_gradient_on_a_mesh_comes_back_as_it_lay(mesh: Any, placement: Any) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    place = gradients.OfParameter(parameter)
    parameter.grad = DTensor.from_local(torch.ones(4, 2), mesh, [placement], run_check=False)
    saved = place.take()
    assert isinstance(saved, torch.Tensor) == (
        placement == Shard(0)
    )  # what a file can hold without torch's meshes
    assert place.misfit(saved) is None
    parameter.grad = None
    place.give(saved)
    made: Any = parameter.grad
    assert made.placements == (placement,)
    assert made.shape == (4, 2)
    assert made.to_local().tolist() == [[1.0, 1.0]] * 4
    assert place.misfit(torch.ones(3, 2)) is not None


def test_a_way_to_lie_that_has_no_text_is_summed_up_first(mesh: Any) -> None:
    class Special(Shard):
        pass

    gradient = DTensor.from_local(torch.ones(2), mesh, [Special(0)], run_check=False)
    saved = gradients.packed(gradient, [Shard(0)])
    assert saved.tolist() == [1.0, 1.0]


def test_a_file_of_somebody_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not known: 'X1'"):
        gradients._placement("X1")


def test_a_torch_that_keeps_gradients_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = SimpleNamespace(sharded_param=nn.Parameter(torch.zeros(2)), is_dtensor=False)
    module = nn.Module()
    module.weight = unit.sharded_param
    monkeypatch.setattr(gradients, "_groups", lambda _: [SimpleNamespace(fsdp_params=[unit])])
    with pytest.raises(UnsupportedError, match="in a place that is not known here"):
        gradients.held_by_fsdp2(module)
