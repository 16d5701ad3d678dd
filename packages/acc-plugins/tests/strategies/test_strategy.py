"""The single-device strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.comm import SoloComm
from acc_ops.world import World
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract

CPU = torch.device("cpu")


def solo(device: torch.device = CPU, **options: Any) -> Strategy:
    return Strategy(World(device=device, comm=SoloComm()), Precision(), **options)


class TestSingleDevice(StrategyContract):
    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        return Strategy(world, precision)


class LossSpy(torch.Tensor):
    """A loss of a class of its own."""


def gradient_of(divisor: float, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    weight = torch.tensor([1.5, -2.0], dtype=dtype, requires_grad=True)
    solo().backward((weight**3).sum(), divisor=divisor, **kwargs)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_backward_gives_the_gradient_of_the_divided_loss_bit_for_bit(
    divisor: float, dtype: torch.dtype
) -> None:
    weight = torch.tensor([1.5, -2.0], dtype=dtype, requires_grad=True)
    ((weight**3).sum() / divisor).backward()
    assert torch.equal(gradient_of(divisor, dtype), weight.grad)
    assert torch.equal(gradient_of(divisor, dtype, retain_graph=True), weight.grad)


def test_backward_by_one_makes_no_new_node_and_hands_kwargs_on() -> None:
    weight = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    solo().backward((weight * other).sum(), inputs=[weight])
    assert weight.grad is not None
    assert other.grad is None


def test_backward_of_a_loss_per_sample_takes_the_users_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    solo().backward(weight * 2, divisor=2, gradient=torch.tensor([1.0, 2.0, 3.0]))
    assert weight.grad.tolist() == [1, 2, 3]


def test_backward_refuses_what_is_no_tensor_and_says_what_it_got() -> None:
    with pytest.raises(TypeError, match=r"got dict: \{'loss': 1\}"):
        solo().backward({"loss": 1})


def test_float32_leaves_forward_and_class_untouched() -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    (got,) = solo().prepare(Bundle(models=[model])).models
    assert got is model
    assert type(model) is nn.Linear
    assert dict(vars(model)) == before


def test_without_sync_hands_out_one_shared_context() -> None:
    strategy, model = solo(), nn.Linear(1, 1)
    assert strategy.without_sync(model) is strategy.without_sync(model)
    with strategy.without_sync(model), strategy.without_sync(model):
        pass
    assert not strategy.synchronises


def test_prepare_changes_neither_the_bundle_nor_its_lists() -> None:
    model = nn.Linear(2, 2)
    bundle = Bundle(models=[model], place=False)
    got = solo(torch.device("meta")).prepare(bundle)
    assert got is not bundle
    assert got.models is not bundle.models
    assert got.models[0].weight.device == CPU  # place=False


def test_prepare_moves_models_where_the_optimizer_still_finds_them() -> None:
    # to meta, as to XLA, a parameter cannot be moved in place
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    optimizer.state[model.weight]["step"] = 3
    (got,) = solo(torch.device("meta")).prepare(Bundle(models=[model], optimizers=[optimizer])).models
    assert got.weight.device.type == "meta"
    assert [group["params"] for group in optimizer.param_groups] == [[got.weight], [got.bias]]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[got.weight] == {"step": 3}
    assert len(optimizer.state) == 1


def test_only_the_writing_rank_writes(tmp_path: Path) -> None:
    class Second(SoloComm):
        rank, size = 2, 4

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for each_node, names in ((False, []), (True, ["model.safetensors", "optimizer.bin"])):
        world = World(rank=2, size=4, local_rank=0, local_size=2, device=CPU, comm=Second())
        strategy = Strategy(world, Precision(), save_on_each_node=each_node)
        written = strategy.save_model(model, strategy.state(model), tmp_path, "model")
        written += strategy.save_optimizer(optimizer, tmp_path, "optimizer")
        assert written == names == sorted(f.name for f in tmp_path.iterdir())


def test_load_model_names_what_is_missing_and_what_is_too_much(tmp_path: Path) -> None:
    strategy = solo()
    strategy.save_model(
        nn.Linear(2, 2), {"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path, "model"
    )
    with pytest.raises(RuntimeError, match=r'(?s)"bias".*"extra"'):
        strategy.load_model(nn.Linear(2, 2), tmp_path, "model")
    result = strategy.load_model(model := nn.Linear(2, 2), tmp_path, "model", strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["extra"])
    assert model.weight.sum() == 4
    with pytest.raises(FileNotFoundError, match="other"):
        strategy.load_model(model, tmp_path, "other")


def test_a_file_without_the_tied_name_loads_into_tied_weights(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    strategy = solo()
    strategy.save_model(model, {"b.weight": torch.full((2, 2), 5.0)}, tmp_path, "model")
    strategy.load_model(model, tmp_path, "model")
    assert model["a"].weight.sum() == 20
    assert model["a"].weight is model["b"].weight


class Surprise:
    def __reduce__(self) -> Any:
        return (print, ("code from a checkpoint runs",))


def test_an_optimizer_file_with_code_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state": Surprise()}, tmp_path / "optimizer.bin")
    with pytest.raises(ValueError, match="add_safe_globals"):
        solo().load_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), tmp_path, "optimizer")
    assert "runs" not in capsys.readouterr().out


def test_a_compiled_model_is_unwrapped_and_saved_under_its_own_names() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    strategy = solo()
    assert strategy.unwrap(compiled) is model
    assert list(strategy.state(compiled)) == ["weight", "bias"]
