"""mixed_precision="fp8" through an Accelerator with the real torchao: one process, two, and back from a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acc_ops.testing import run_processes
from acc_plugins.options.fp8 import AORecipeKwargs
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

torchao = pytest.importorskip("torchao", reason="torchao computes in fp8; it is not installed")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    AcceleratorState._reset_state(True)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def batches() -> torch.Tensor:
    return torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1))


def train(accelerator: Accelerator, rows: slice = slice(None)) -> tuple[Any, list[float]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        for x in batches():
            loss = (model(x[rows]) - x[rows].mean(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear)]


def test_a_model_trains_in_fp8_and_is_unwrapped_as_it_was() -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    assert (accelerator.mixed_precision, accelerator.fp8_backend.value) == ("fp8", "AO")
    assert accelerator.fp8_enabled
    model, losses = train(accelerator)
    assert kinds(model) == ["Linear", "Float8Linear", "Linear"]
    assert losses[-1] < 0.5 * losses[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert list(accelerator.get_state_dict(model)) == list(build().state_dict())
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert kinds(inner) == ["Linear"] * 3


def test_the_recipe_is_a_handler_and_shows() -> None:
    recipe = AORecipeKwargs(module_filter_func=lambda *_: True)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe])
    assert accelerator.ao_recipe_handler is accelerator.fp8_recipe_handler is recipe
    assert accelerator.has_fp8_handler
    assert accelerator.te_recipe_handler is None
    assert kinds(accelerator.prepare(build())) == ["Float8Linear"] * 3


def test_a_recipe_without_fp8_is_refused_and_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="mixed_precision is 'bf16'"):
        Accelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[AORecipeKwargs()])
    assert Accelerator(mixed_precision="fp8", cpu=True).fp8_enabled


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model, _ = train(accelerator)
    accelerator.save_state(str(tmp_path / "state"))
    expected = copy.deepcopy(model)(batches()[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model(batches()[0]), expected)


def two_ranks() -> tuple[list[float], list[str], bool]:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    rank = accelerator.process_index
    model, losses = train(accelerator, slice(16 * rank, 16 * (rank + 1)))
    total = accelerator.gather(torch.tensor([losses])).mean(0)
    weights = accelerator.gather(model.module[2].weight.detach()[None])
    same = torch.equal(weights[0], weights[1])
    return total.tolist(), kinds(model), same and type(model) is DistributedDataParallel


def test_two_processes_train_near_one_and_stay_equal() -> None:
    _, alone = train(Accelerator(mixed_precision="fp8", cpu=True))
    for losses, found, same in run_processes(2, two_ranks):
        assert found == ["Linear", "Float8Linear", "Linear"]
        assert same
        assert losses == pytest.approx(alone, rel=0.1, abs=0.01)
