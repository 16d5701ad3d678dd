"""Tensor parallelism keeps the strategy contract, alone and under FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from acc_ops.testing import run_processes
from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel import set_plan
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Strategy
from acc_plugins.testing import StrategyContract


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


def _checks(contract: type[StrategyContract], folder: str) -> list[str]:
    torch.set_num_threads(1)
    if contract is TensorParallelContract:
        Float8BesideSplitContract().check_precisions()
    return contract().run_on_this_rank(folder)


@pytest.mark.parametrize("contract", [TensorParallelContract, ShardedTensorParallelContract])
def test_split_layers_keep_the_strategy_contract(contract: type[StrategyContract], tmp_path: Any) -> None:
    ran, *_ = run_processes(contract.size, _checks, contract, str(tmp_path), timeout_s=250)
    assert len(ran) == len([name for name in dir(StrategyContract) if name.startswith("test_")])
