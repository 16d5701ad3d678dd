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
from acc_plugins.strategies import flat_gradients, gradients
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


def test_of_what_fsdp1_has_put_aside_only_the_part_of_emptied_parameters_goes() -> None:
    own, others, elsewhere = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    flat: Any = nn.Parameter(torch.zeros(4))
    flat._params, flat._sharded_size = [elsewhere, own, others], torch.Size([4])
    flat._shard_param_infos = [
        SimpleNamespace(in_shard=at is not None, offset_in_shard=at, numel_in_shard=2) for at in (None, 0, 2)
    ]
    place = flat_gradients.PutAside(SimpleNamespace(flat_param=flat))
    assert place.take() is None
    place.forget({id(own)})
    place.give(torch.ones(4))
    assert place.misfit(torch.ones(4)) is None
    assert place.misfit(torch.ones(3)) == "one of shape (4,)"
    place.forget({id(own), id(elsewhere)})
    assert place.take().tolist() == [0, 0, 1, 1]
    place.scale(3)
    assert flat._saved_grad_shard.tolist() == [0, 0, 3, 3]
    place.forget({id(flat)})
    assert not hasattr(flat, "_saved_grad_shard")  # torch would add to it


def test_a_torch_that_keeps_gradients_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = SimpleNamespace(sharded_param=nn.Parameter(torch.zeros(2)), is_dtensor=False)
    module = nn.Module()
    module.weight = unit.sharded_param
    monkeypatch.setattr(gradients, "_groups", lambda _: [SimpleNamespace(fsdp_params=[unit])])
    with pytest.raises(UnsupportedError, match="in a place that is not known here"):
        gradients.held_by_fsdp2(module)
