"""torch.compile through an Accelerator: how many graphs it makes, with every precision, under DDP, and what is left of it in names and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from acc_ops.optional import is_available
from acc_ops.regions import has_compiled_regions, is_compiled_module
from acc_ops.testing import run_processes
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

LAYERS = 12
PRECISIONS = ["no", "bf16", *(["fp8"] if is_available("torchao") else [])]
HOW = {"eager": None, "whole": False, "regional": True}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


@pytest.fixture(autouse=True)
def fresh() -> Any:
    forget()
    yield
    forget()


def forget() -> None:
    torch._dynamo.reset()
    counters.clear()
    AcceleratorState._reset_state(True)


def accelerator_for(how: str, precision: str = "no") -> Accelerator:
    regional = HOW[how]
    plugin = TorchDynamoPlugin(
        backend="NO" if regional is None else "EAGER",  # text is read
        use_regional_compilation=regional,
    )
    return Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin
    )


def trained(accelerator: Accelerator, batches: int = 6) -> tuple[nn.Module, Any, Any, list[float]]:
    own = Deep()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(batches):
        x = torch.randn(4, 8, generator=generator)
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return own, model, optimizer, losses


def compiled() -> tuple[int, int]:
    """How many graphs were compiled, and how many operations they hold together."""
    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]


def test_repeated_blocks_are_compiled_once_for_all_of_them() -> None:
    trained(accelerator_for("whole"))
    graphs, operations = compiled()
    assert graphs == 1
    assert operations >= 5 * LAYERS
    forget()
    trained(accelerator_for("regional"))
    assert compiled() == (3, 1 + 5 + 1)  # the first layer, the block, the last layer


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", ["whole", "regional"])
def test_a_compiled_model_trains_as_the_same_one_does_without(how: str, precision: str) -> None:
    own, _, _, expected = trained(accelerator_for("eager", precision))
    weights = own.state_dict()
    forget()
    other, _, _, losses = trained(accelerator_for(how, precision))
    assert compiled()[0] == (1 if how == "whole" else 3)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(other.state_dict(), weights)


@pytest.mark.parametrize("how", ["whole", "regional"])
def test_names_and_files_are_those_of_the_users_own_model(how: str, tmp_path: Path) -> None:
    accelerator = accelerator_for(how)
    own, model, _, _ = trained(accelerator)
    assert is_compiled_module(model) or has_compiled_regions(model)
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    assert list(accelerator.get_state_dict(model)) == list(Deep().state_dict())
    kept = accelerator.unwrap_model(model)
    assert is_compiled_module(kept) or has_compiled_regions(kept)
    accelerator.save_state(str(tmp_path / "state"))
    before = {name: value.clone() for name, value in own.state_dict().items()}
    with torch.no_grad():
        own.first.weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    torch.testing.assert_close(own.state_dict(), before, rtol=0, atol=0)
    forget()
    _, uncompiled, _, _ = trained(other := accelerator_for("eager"), batches=0)
    other.load_state(str(tmp_path / "state"))  # written compiled, read without
    torch.testing.assert_close(uncompiled.state_dict(), before, rtol=0, atol=0)


def test_what_the_user_compiled_is_not_compiled_again() -> None:
    accelerator = accelerator_for("whole")
    mine = torch.compile(Deep(), backend="eager")
    assert accelerator.prepare(mine) is mine


def under_ddp() -> dict[str, tuple[list[float], int, bool, bool]]:
    found = {}
    for how in HOW:
        accelerator = accelerator_for(how)
        own, model, _, losses = trained(accelerator)
        weights = accelerator.gather(own.last.weight.detach()[None])
        found[how] = (
            losses,
            compiled()[0],
            torch.equal(weights[0], weights[1]),
            accelerator.unwrap_model(model, keep_torch_compile=False) is own,
        )
        torch._dynamo.reset()
        counters.clear()
        AcceleratorState._reset_state()
    return found


def test_ddp_synchronises_a_compiled_model_as_another() -> None:
    for found in run_processes(2, under_ddp):
        assert {how: graphs for how, (_, graphs, _, _) in found.items()} == {
            "eager": 0,
            "whole": 1,
            "regional": 3,
        }
        for losses, _, same_weights, is_own in found.values():
            torch.testing.assert_close(losses, found["eager"][0])
            assert same_weights
            assert is_own
