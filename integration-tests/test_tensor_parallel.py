"""Tensor parallelism keeps the strategy contract, alone and under FSDP2; and every style of splitting a layer leaves the numbers as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from decoder import TIME, VOCABULARY, WIDTH, assert_same, batch_of, whole
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from acc_ops.testing import run_processes
from acc_ops.world import World, current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel import set_plan
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.mesh import MeshStrategy
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract
from acc_trainer import Accelerator


class TensorParallelContract(StrategyContract):
    """Two linear layers split by columns and by rows; both ranks see the same samples."""

    size = 2
    shows_local_gradients = False
    plugin: ClassVar[dict[str, Any] | None] = None
    sizes: ClassVar[dict[str, int]] = {"tp_size": 2}
    plan: ClassVar[dict[str, str]] = {"0": "colwise", "2": "rowwise"}
    precisions = ("no", "bf16", "fp16")

    def model(self, seed: int = 0) -> nn.Module:
        model = super().model(seed)
        set_plan(model, self.plan)
        return model

    def tied_model(self) -> nn.Module:
        model = super().tied_model()
        set_plan(model, {"first": "colwise_gather_output", "second": "colwise_gather_output"})
        return model

    def data_place(self, world: World) -> tuple[int, int]:
        tp = self.sizes.get("tp_size", 1)
        return world.rank // tp, world.size // tp

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        parallelism = ParallelismConfig(**self.sizes)
        meshed = replace(world, mesh=parallelism.build_device_mesh("cpu"))
        plugin = (
            None if self.plugin is None else FullyShardedDataParallelPlugin(fsdp_version=2, **self.plugin)
        )
        return choose_strategy(meshed, precision, fsdp=plugin, parallelism=parallelism)


class Float8BesideSplitContract(TensorParallelContract):
    """fp8 computes in the inner layer, which is not split."""

    plan: ClassVar[dict[str, str]] = {"0": "colwise_gather_output"}
    precisions = ("fp8",)


class ShardedTensorParallelContract(TensorParallelContract):
    """Four ranks: the halves of the layers are sharded over two ranks each."""

    size = 4
    whole_files = False
    plugin: ClassVar[dict[str, Any] | None] = {"state_dict_type": "FULL_STATE_DICT"}
    sizes: ClassVar[dict[str, int]] = {"tp_size": 2, "dp_shard_size": 2}
    precisions = ("bf16", "fp16")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _places_shared_out_between_split_layers() -> None:
    """torch's own styles: between the split layers each rank has half of the places, and norms see those only ("sequence_parallel")."""

    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        ends = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        return nn.Sequential(ends[0], Residual(), Residual(), *ends[1:]).double()

    def trained(model: nn.Module, backward: Any, clip: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(5):
            batch = batch_of(step)
            loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())
            backward(loss)
            clip(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    reference, own = made(0), made(accelerator.process_index)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "*.norm": "sequence_parallel",
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1)),
        "3": "sequence_parallel",
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    set_plan(own, plan)
    seen: list[int] = []
    own[1].up.register_forward_pre_hook(lambda _, given: seen.append(given[0].to_local().shape[1]))
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=1e-2))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = trained(reference, Tensor.backward, nn.utils.clip_grad_norm_, plain)
    got = trained(model, accelerator.backward, accelerator.clip_grad_norm_, optimizer)
    assert got == pytest.approx(expected, rel=1e-9)
    weights = {name: p.detach() for name, p in reference.named_parameters()}
    assert_same({name: whole(p.detach()) for name, p in own.named_parameters()}, weights)
    assert set(seen) == {TIME // 2}
    accelerator.end_training()


def _what_is_left_out_is_the_same_on_ranks_that_split_a_layer() -> None:
    """Dropout of what every rank has: weights stay the same, though the ranks were seeded differently."""

    world = current_world()
    torch.manual_seed(world.rank)
    config = ParallelismConfig(tp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    own: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 8), nn.Linear(8, 1))
    own.tp_plan = {"2": "colwise", "3": "rowwise"}
    (model,) = strategy.prepare(Bundle(models=[own])).models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        strategy.backward(model(torch.ones(3, 4)).sum())
        strategy.step(optimizer)
    everyone = world.comm.all_gather(own[0].weight.detach())
    assert torch.equal(everyone[0], everyone[1])


def _embeddings_of_every_style() -> None:
    """The part that is checked is the part that is split, and the numbers stay; a weight that two layers share stays one."""

    class Scores(nn.Module):
        def __init__(self, rows: int, columns: int, *, tied: bool) -> None:
            super().__init__()
            self.tokens = nn.Embedding(rows, columns)
            self.head = nn.Linear(columns, rows, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.tokens(ids))

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    ids = torch.arange(6)
    for rows, columns, plan, tied in (
        (6, 5, {"tokens": "rowwise_rep"}, False),
        (6, 5, {"tokens": "rowwise_split_input"}, False),
        (7, 8, {"tokens": "colwise_rep"}, False),
        (7, 8, {"tokens": "colwise_gather_output"}, False),
        (6, 5, {"tokens": "rowwise_rep", "head": "colwise_rep"}, True),
        (7, 8, {"tokens": "colwise_gather_output"}, True),
        (7, 8, {"tokens": "colwise_rep", "head": "rowwise_rep"}, True),
    ):
        torch.manual_seed(0)
        own = Scores(rows, columns, tied=tied)
        expected = own(ids).detach()
        set_plan(own, plan)
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        torch.testing.assert_close(model(ids), expected)
        assert (own.head.weight is own.tokens.weight) == tied
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        assert list(map(id, listed)) == list(map(id, own.parameters()))
    accelerator.end_training()


def _checks(contract: type[StrategyContract], folder: str) -> list[str]:
    torch.set_num_threads(1)
    if contract is TensorParallelContract:
        Float8BesideSplitContract().check_precisions()
        _places_shared_out_between_split_layers()
        _what_is_left_out_is_the_same_on_ranks_that_split_a_layer()
        _embeddings_of_every_style()
    return contract().run_on_this_rank(folder)


@pytest.mark.parametrize("contract", [TensorParallelContract, ShardedTensorParallelContract])
def test_split_layers_keep_the_strategy_contract(contract: type[StrategyContract], tmp_path: Any) -> None:
    ran, *_ = run_processes(contract.size, _checks, contract, str(tmp_path), timeout_s=250)
    assert len(ran) == len([name for name in dir(StrategyContract) if name.startswith("test_")])
