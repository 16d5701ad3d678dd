"""torch.compile through an Accelerator: how many graphs it makes, with every precision and strategy, and what is left of it in names and files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from acc_ops.optional import is_available
from acc_ops.regions import has_compiled_regions, is_compiled_module
from acc_ops.testing import run_processes
from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.parallel import set_plan
from acc_plugins.strategies.ddp import DDPStrategy
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


def accelerator_for(how: str, precision: str = "no", **options: Any) -> Accelerator:
    regional = HOW[how]
    plugin = TorchDynamoPlugin(
        backend="NO" if regional is None else "EAGER",  # text is read
        use_regional_compilation=regional,
    )
    return Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin, **options
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


STRATEGIES = ("ddp", "fsdp1", "fsdp2", "tp")
# two graphs besides that of the block: the first layer's and the last one's, which torch leaves alone where it compiles in place
BESIDES = {"ddp": 2, "fsdp1": 0, "fsdp2": 0, "tp": 2}


def options_of(strategy: str) -> dict[str, Any]:
    if strategy.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(strategy[-1]),
            use_orig_params=True if strategy == "fsdp1" else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="FULL_STATE_DICT",
        )
        return {"fsdp_plugin": plugin}
    return {"parallelism_config": ParallelismConfig(tp_size=2)} if strategy == "tp" else {}


def a_life(strategy: str, how: str, folder: Path) -> tuple[list[float], list[int], list[float]]:
    """A run with all that could compile anew: its losses, how many graphs there are after each part of it, and gradients of this rank alone."""
    accelerator = accelerator_for("eager" if how == "by hand" else how, **options_of(strategy))
    own = Deep()
    if strategy == "tp":
        set_plan(own, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    if how == "by hand":
        for block in own.blocks:
            block.compile(backend="eager")
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(0 if strategy == "tp" else accelerator.process_index)
    losses, graphs = [], []

    def train(*rows: int) -> None:
        for count in rows:
            with accelerator.accumulate(model):
                loss = model(torch.randn(count, 8, generator=generator)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        graphs.append(compiled()[0])

    train(4, 4, 4, 4)
    train(6, 6, 7, 5)  # sizes that change: one graph for all of them
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.train()
    train(4, 4)
    assert accelerator.prepare(model) is model
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    train(4, 4)
    state = accelerator.get_state_dict(model)
    assert not accelerator.is_main_process or list(state) == list(Deep().state_dict())
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    return losses, graphs, gradients_of_one_rank(accelerator, model, torch.randn(4, 8, generator=generator))


def gradients_of_one_rank(accelerator: Accelerator, model: Any, x: torch.Tensor) -> list[float]:
    """The norms of what a micro-batch under `no_sync` leaves, wherever it lies; then a step takes everybody's."""
    with accelerator.no_sync(model):
        accelerator.backward(model(x).square().mean())
    places = accelerator.strategy.gradient_places(model).values()
    left = [gradient for place in places if (gradient := place.take()) is not None]
    norms = [(one["part"] if isinstance(one, dict) else one).norm().item() for one in left]
    order = accelerator.strategy.exchange_order(model)
    if order is not None:
        assert sorted(name for bucket in order for name in bucket) == sorted(Deep().state_dict())
        assert accelerator.strategy.restore_exchange_order(model, order)
    assert (order is not None) == isinstance(accelerator.strategy, DDPStrategy)
    return norms


Life = tuple[list[float], list[int], list[float]]


def lives(strategies: tuple[str, ...], folder: Path) -> dict[str, dict[str, Life]]:
    found: dict[str, dict[str, Life]] = {}
    for strategy in strategies:
        for how in (*HOW, "by hand"):
            found.setdefault(strategy, {})[how] = a_life(strategy, how, folder / strategy / how)
            torch._dynamo.reset()
            counters.clear()
            AcceleratorState._reset_state()
    return found


def in_two_processes(folder: Path) -> dict[str, Any]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("acc_trainer.preparing").addHandler(handler)
    flat = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False)
    accelerator_for("regional", fsdp_plugin=flat).prepare(Deep())
    AcceleratorState._reset_state()
    return {"said": " ".join(heard), **lives(STRATEGIES, folder)}


def check_lives(found: dict[str, Life], besides: int) -> None:
    eager, _, norms = found["eager"]
    for losses, _, left in found.values():
        torch.testing.assert_close(losses, eager)
        torch.testing.assert_close(left, norms)
    by_hand = found["by hand"][1]
    assert by_hand == [1, 2, 3, 3]  # the block: for one size, for any, without gradients
    assert found["regional"][1] == [(1 + besides) * graphs for graphs in by_hand]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twelve_blocks_are_one_graph_under_every_strategy(
    lives_of_two: list[dict[str, Any]], strategy: str
) -> None:
    for found in lives_of_two:
        check_lives(found[strategy], BESIDES[strategy])
    first, second = (found[strategy]["eager"][2] for found in lives_of_two)
    assert first != second or strategy == "tp"  # whose ranks have the same batch


@pytest.fixture(scope="module")
def lives_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(2, in_two_processes, tmp_path_factory.mktemp("compiled"), timeout_s=300)


def test_twelve_blocks_are_one_graph_in_one_process(tmp_path: Path) -> None:
    check_lives(lives(("single",), tmp_path)["single"], 2)


def test_a_model_that_torch_does_not_look_into_is_said_not_to_be_compiled(
    lives_of_two: list[dict[str, Any]],
) -> None:
    for found in lives_of_two:
        assert "use_orig_params=False" in found["said"]
