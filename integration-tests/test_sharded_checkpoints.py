"""What one strategy and mesh has saved, every other one loads, and goes on as if nothing had happened. Real gloo processes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_ops.collectives import barrier
from acc_ops.testing import run_processes
from acc_ops.world import World, current_world
from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig, Precision
from acc_plugins.parallel import set_plan
from acc_plugins.states.merge import merge_fsdp_weights
from acc_plugins.states.sharded import ShardedPart
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.mesh import MeshStrategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_trainer.checkpoint.staging import Staging

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
BEFORE, AFTER = 2, 3  # steps before a save, and after a load
Optimizing = Callable[[nn.Module], Any]
Choosing = Callable[[World], Strategy]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Small(nn.Module):
    """Sizes that two and four do not divide, a frozen block, a buffer, names that stand before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Small().double()
    set_plan(model, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def in_two_groups(model: nn.Module) -> Any:
    """Their order is not that of the model; a group holds whole blocks, since FSDP1's flat parameters have one setting."""
    blocks = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.requires_grad]
    others = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    return torch.optim.AdamW([{"params": blocks}, {"params": others, "lr": 2e-2}], lr=1e-2, amsgrad=True)


OPTIMIZERS: dict[str, Optimizing] = {
    "adamw in two groups": in_two_groups,
    "momentum": lambda model: torch.optim.SGD(trained(model), lr=0.05, momentum=0.9),
    "adam, frozen ones too": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adagrad, whose state exists before": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=0.05, initial_accumulator_value=0.1
    ),
}


BY_BLOCK: dict[str, Any] = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block"],
}


def plugin(version: int, kind: str, **more: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **(more or BY_BLOCK))


def mesh_of(world: World, **sizes: int) -> dict[str, Any]:
    parallelism = ParallelismConfig(**sizes)
    return {"parallelism": parallelism, "mesh": parallelism.build_device_mesh(world.device.type)}


def single(world: World) -> Strategy:
    return Strategy(world, Precision())


ON_TWO: dict[str, Choosing] = {
    "ddp": lambda world: DDPStrategy(world, Precision()),
    "fsdp1 flat": lambda world: FSDP1Strategy(world, Precision(), plugin(1, FULL)),
    "fsdp1": lambda world: FSDP1Strategy(
        world, Precision(), plugin(1, SHARDED, use_orig_params=True, **BY_BLOCK)
    ),
    "fsdp2 full": lambda world: FSDP2Strategy(world, Precision(), plugin(2, FULL)),
    "fsdp2": lambda world: FSDP2Strategy(world, Precision(), plugin(2, SHARDED)),
    "tp": lambda world: MeshStrategy(world, Precision(), **mesh_of(world, tp_size=2)),
}
ON_FOUR: dict[str, Choosing] = {
    "fsdp2 x tp": lambda world: FSDP2Strategy(
        world, Precision(), plugin(2, SHARDED), **mesh_of(world, dp_shard_size=2, tp_size=2)
    ),
    "replicas x fsdp2": lambda world: FSDP2Strategy(
        world, Precision(), plugin(2, SHARDED), **mesh_of(world, dp_replicate_size=2, dp_shard_size=2)
    ),
}


class Run:
    """A model and its optimizer under a strategy; every rank sees the same batches, so that all runs are the same run."""

    def __init__(self, choose: Choosing, optimizing: Optimizing, seed: int = 0) -> None:
        self.strategy = choose(current_world())
        model = small(seed)
        made = self.strategy.prepare(Bundle(models=[model], optimizers=[optimizing(model)]))
        self.model, self.optimizer = made.models[0], made.optimizers[0]

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            loss = self.model(x).square().mean()
            self.strategy.backward(loss)
            self.strategy.step(self.optimizer)
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> list[str]:
        if self.strategy.world.is_main:
            folder.mkdir(parents=True)
        barrier(self.strategy.world)
        written = self.strategy.save_model(self.model, None, folder, "model")
        written += self.strategy.save_optimizer(self.optimizer, folder, "optimizer")
        barrier(self.strategy.world)
        return written

    def load(self, folder: Path) -> Run:
        loads = [
            self.strategy.open_model(self.model, folder, "model"),
            self.strategy.open_optimizer(self.optimizer, folder, "optimizer"),
        ]
        for load in loads:
            load()
        return self


def assert_goes_on(choose: Choosing, optimizing: Optimizing, folder: Path, expected: list[float]) -> None:
    run = Run(choose, optimizing, seed=9).load(folder)
    assert run.train(BEFORE, AFTER) == pytest.approx(expected, rel=1e-12, abs=1e-15), folder


def reference(optimizing: Optimizing) -> list[float]:
    """The losses after the save of a run on one device."""
    run = Run(single, optimizing)
    run.train(0, BEFORE)
    return run.train(BEFORE, AFTER)


def _every_pair(home: Path) -> None:
    for kind, optimizing in OPTIMIZERS.items():
        expected = reference(optimizing)
        for writer, choose in ON_TWO.items():
            run = Run(choose, optimizing)
            run.train(0, BEFORE)
            run.save(home / kind / writer)
            assert run.train(BEFORE, AFTER) == pytest.approx(expected, rel=1e-12, abs=1e-15), writer
        every = ["single", *ON_TWO]
        for writer in every if optimizing is in_two_groups else ("single", "fsdp1", "fsdp2 full"):
            for choose in ON_TWO.values():
                assert_goes_on(choose, optimizing, home / kind / writer, expected)


def _run_all(functions: list[Callable[[Path], None]], home: Path) -> None:
    for function in functions:
        function(home)


def test_every_strategy_loads_what_every_other_one_saved_on_any_number_of_ranks(tmp_path: Path) -> None:
    for kind, optimizing in OPTIMIZERS.items():
        run = Run(single, optimizing)
        run.train(0, BEFORE)
        run.save(tmp_path / kind / "single")
    run_processes(2, _run_all, ON_TWO_RANKS, tmp_path, timeout_s=300)
    run_processes(4, _run_all, ON_FOUR_RANKS, tmp_path, timeout_s=300)
    for kind, optimizing in OPTIMIZERS.items():
        for writer in [*ON_TWO, *(ON_FOUR if optimizing is in_two_groups else ())]:  # 2 -> 1 and 4 -> 1
            assert_goes_on(single, optimizing, tmp_path / kind / writer, reference(optimizing))


def _four_from_one_and_two(home: Path) -> None:
    kind, optimizing = next(iter(OPTIMIZERS.items()))
    expected = reference(optimizing)
    for reader, choose in ON_FOUR.items():
        for writer in ("single", "fsdp1", "fsdp2", "tp"):
            assert_goes_on(choose, optimizing, home / kind / writer, expected)
        run = Run(choose, optimizing).load(home / kind / "fsdp2 full")
        run.save(home / kind / reader)
        assert_goes_on(ON_FOUR["fsdp2 x tp"], optimizing, home / kind / reader, expected)


def _files_have_the_names_of_the_specification(home: Path) -> None:
    kind = next(iter(OPTIMIZERS))
    found = {writer: {file.name for file in (home / kind / writer).iterdir()} for writer in ON_TWO}
    whole, shards = {"model.safetensors", "optimizer.bin"}, {"pytorch_model_fsdp_0", "optimizer_0"}
    assert found["ddp"] == found["tp"] == whole
    assert found["fsdp1 flat"] == found["fsdp2 full"] == {"pytorch_model_fsdp.bin", "optimizer.bin"}
    assert found["fsdp1"] == found["fsdp2"] == shards
    assert str(home).encode() not in (home / kind / "fsdp2" / "optimizer_0" / ".metadata").read_bytes()


def _errors_come_before_anything_is_changed(home: Path) -> None:
    folder = home / "momentum" / "fsdp2"
    for choose in ON_TWO.values():
        run = Run(choose, OPTIMIZERS["momentum"], seed=9)
        other: Any = small()
        other.added = nn.Linear(2, 2).double()
        del other.first
        (made,) = run.strategy.prepare(Bundle(models=[other])).models
        with pytest.raises(RuntimeError, match=r'(?s)Missing.*"added.weight".*Unexpected.*"first.weight"'):
            run.strategy.load_model(made, folder, "model")
        wider: Any = small()
        wider.last = nn.Linear(6, 4).double()
        (made,) = run.strategy.prepare(Bundle(models=[wider])).models
        before = {name: tensor.clone() for name, tensor in run.strategy.state(made).items()}
        with pytest.raises(RuntimeError, match=r"size mismatch for last\.weight"):
            run.strategy.load_model(made, folder, "model")
        after = run.strategy.state(made)
        assert all(torch.equal(after[name], before[name]) for name in before)
        with pytest.raises(ValueError, match="groups"):
            run.strategy.load_optimizer(run.optimizer, home / "adamw in two groups" / "fsdp2", "optimizer")
        with pytest.raises(FileNotFoundError, match="no weights called 'model_3'"):
            run.strategy.open_model(made, folder, "model_3")


def _copies_of_a_state_are_written_later(home: Path) -> None:
    """What a background save does: the copies hold the values of the moment, whatever the training changes."""
    optimizing = OPTIMIZERS["adamw in two groups"]
    for name in ("fsdp1", "fsdp2"):
        run = Run(ON_TWO[name], optimizing)
        run.train(0, BEFORE)
        parts = [
            run.strategy.model_part(run.model, None, "model"),
            run.strategy.optimizer_part(run.optimizer, "optimizer"),
        ]
        assert all(isinstance(part, ShardedPart) for part in parts)
        copies = Staging().copies([part for part in parts if part is not None])
        expected = run.train(BEFORE, AFTER)
        folder = home / "copies" / name
        folder.mkdir(parents=True, exist_ok=True)
        for part in copies:
            part.write(folder)
        barrier()
        assert_goes_on(ON_TWO["fsdp2"], optimizing, folder, expected)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def _tied_weights_stay_tied(home: Path) -> None:
    whole: dict[str, Any] = {"auto_wrap_policy": "no_wrap"}
    choices: dict[str, Choosing] = {
        "ddp": ON_TWO["ddp"],
        "fsdp1": lambda world: FSDP1Strategy(world, Precision(), plugin(1, SHARDED, **whole)),
        "fsdp2 full": lambda world: FSDP2Strategy(world, Precision(), plugin(2, FULL, **whole)),
        "fsdp2": lambda world: FSDP2Strategy(world, Precision(), plugin(2, SHARDED, **whole)),
    }
    expected = Tied().double().state_dict()
    for name, choose in choices.items():
        strategy = choose(current_world())
        (model,) = strategy.prepare(Bundle(models=[Tied().double()])).models
        folder = home / "tied" / name
        folder.mkdir(parents=True, exist_ok=True)
        strategy.save_model(model, None, folder, "model")
        barrier()
        for reader in choices.values():
            other = reader(current_world())
            (made,) = other.prepare(Bundle(models=[Tied(5).double()])).models
            other.load_model(made, folder, "model")
            state = other.state(made)
            assert set(state) in (set(), set(expected))
            assert all(torch.equal(state[name], expected[name]) for name in state)


def _several_models_and_optimizers(home: Path) -> None:
    """Two models with the same names, an optimizer of each and one of both."""
    for name in ("ddp", "fsdp2 full", "fsdp2"):
        strategies = []
        for seed in (0, 7):
            strategy = ON_TWO[name](current_world())
            models: list[nn.Module] = [small(seed), small(seed + 1)]
            every = [p for model in models for p in trained(model)]
            optimizers = [torch.optim.Adam(trained(models[0])), torch.optim.SGD(every, lr=0.1, momentum=0.5)]
            made = strategy.prepare(Bundle(models=models, optimizers=optimizers))
            strategies.append((strategy, made))
        folder = home / "several" / name
        folder.mkdir(parents=True, exist_ok=True)
        results = []
        for turn, (strategy, made) in enumerate(strategies):
            if turn:
                for index in range(2):
                    strategy.load_model(made.models[index], folder, f"model_{index}" if index else "model")
                    strategy.load_optimizer(
                        made.optimizers[index], folder, f"optimizer_{index}" if index else "optimizer"
                    )
            losses = []
            for step in range(4 if turn == 0 else 2):
                if turn == 0 and step == 2:
                    for index in range(2):
                        strategy.save_model(
                            made.models[index], None, folder, f"model_{index}" if index else "model"
                        )
                        strategy.save_optimizer(
                            made.optimizers[index], folder, f"optimizer_{index}" if index else "optimizer"
                        )
                    barrier()
                x = torch.ones(2, 5, dtype=torch.float64) * (1 + step % 2)
                loss = sum(model(x).square().mean() for model in made.models)
                strategy.backward(loss)
                for optimizer in made.optimizers:
                    strategy.step(optimizer)
                    optimizer.zero_grad()
                losses.append(loss.item())
            results.append(losses)
        assert results[1] == pytest.approx(results[0][2:], rel=1e-12), name


def _merged_shards_are_the_weights(home: Path) -> None:
    folder = home / "momentum" / "fsdp2"
    merge_fsdp_weights(str(folder), str(home / "merged"))
    run = Run(ON_TWO["ddp"], OPTIMIZERS["momentum"], seed=9)
    run.strategy.load_model(run.model, home / "merged", "model")
    other = Run(ON_TWO["ddp"], OPTIMIZERS["momentum"], seed=8)
    other.strategy.load_model(other.model, folder, "model")
    mine, theirs = run.strategy.state(run.model), other.strategy.state(other.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match="pytorch_model_fsdp_0"):  # on every rank, with a hint
        merge_fsdp_weights(str(folder / "optimizer_0"), str(home / "merged"))


ON_TWO_RANKS = [
    _every_pair,
    _files_have_the_names_of_the_specification,
    _errors_come_before_anything_is_changed,
    _copies_of_a_state_are_written_later,
    _tied_weights_stay_tied,
    _several_models_and_optimizers,
    _merged_shards_are_the_weights,
]
ON_FOUR_RANKS = [_four_from_one_and_two]
