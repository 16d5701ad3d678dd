"""Both versions of FSDP keep the strategy contract, in all their forms, on real gloo processes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from sharded import HAS_FSDP2, fsdp1, fsdp2, is_linear
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from acc_ops.testing import run_processes
from acc_ops.world import World, current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.names import plain_name
from acc_plugins.strategies.contract_samples import sample_optimizer
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract

_NEEDS_NUMPY = "torch 2.6 gathers optimizer states through it"


class FlatContract(StrategyContract):
    """One flat parameter for the whole model, in the optimizer too."""

    size = 2
    shows_local_gradients = False
    whole_files = False
    options: ClassVar[dict[str, Any]] = {}

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        return fsdp1(precision, **self.options)

    def whole_gradients(self, strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
        """From the flat gradients of all ranks, which lie one after the other, with room at the end."""
        found: dict[str, Tensor] = {}
        for name, unit in model.named_modules():
            if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
                continue
            flat = unit._handle.flat_param
            whole = strategy.world.comm.all_gather(flat.grad).reshape(-1)
            pieces = whole[: sum(flat._numels)].split(list(flat._numels))
            for inner, shape, piece in zip(flat._fqns, flat._shapes, pieces, strict=True):
                found[plain_name(f"{name}.{inner}".lstrip("."))] = piece.view(shape)
        order = [plain_name(name) for name, _ in self.model().named_parameters()]
        return {name: found[name] for name in order}


class BlocksContract(FlatContract):
    """A flat parameter for each linear layer, the originals in the optimizer."""

    options: ClassVar[dict[str, Any]] = {
        "use_orig_params": True,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Linear"],
        "sharding_strategy": "SHARD_GRAD_OP",
        "activation_checkpointing": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }

    def whole_gradients(self, strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            named = strategy.unwrap(model).named_parameters()
            return {plain_name(name): p.grad.clone() for name, p in named if p.grad is not None}


class WholeContract(BlocksContract):
    """Nothing sharded."""

    options: ClassVar[dict[str, Any]] = {"use_orig_params": True, "sharding_strategy": "NO_SHARD"}


class HybridFSDP1Contract(BlocksContract):
    """Shards within a node of two ranks, copies between the two nodes."""

    size = 4
    precisions = ("fp16",)
    options: ClassVar[dict[str, Any]] = {
        "use_orig_params": True,
        "sharding_strategy": "HYBRID_SHARD",
        "auto_wrap_policy": "size_based_wrap",
        "min_num_params": 100,
    }

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        node = dataclasses.replace(world, local_size=2, local_rank=world.rank % 2)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **self.options)
        return FSDP1Strategy(node, precision, plugin)


class FSDP2Contract(StrategyContract):
    """The root alone, whole weights in files."""

    size = 2
    shows_local_gradients: ClassVar[bool] = False
    whole_files: ClassVar[bool] = False  # FSDP's own names
    options: ClassVar[dict[str, Any]] = {"state_dict_type": "FULL_STATE_DICT"}

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        return fsdp2(precision, **self.options)


class FSDP2BlocksContract(FSDP2Contract):
    """Every layer a unit that computes again in backward, shards in CPU memory and in files."""

    options: ClassVar[dict[str, Any]] = {
        "auto_wrap_policy": is_linear,
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
        "cpu_offload": True,
        "reshard_after_forward": False,
    }
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp8")


class HybridFSDP2Contract(FSDP2Contract):
    """Two copies of a model that two ranks share each."""

    size = 4
    precisions: ClassVar[tuple[str, ...]] = ("fp16",)

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        mesh = parallelism.build_device_mesh("cpu")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=is_linear)
        strategy = FSDP2Strategy(world, precision, plugin, mesh=mesh, parallelism=parallelism)
        assert strategy.sharding.shards.mesh_dim_names == ("dp_replicate", "dp_shard")
        return strategy


def _contracts(contracts: list[type[StrategyContract]], folder: str) -> list[str]:
    torch.set_num_threads(1)
    return [name for contract in contracts for name in contract().run_on_this_rank(folder)]


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        out: Tensor = getattr(self, branch)(x)
        return out.sum()


def _resumed_run_exchanges_what_a_block_has_held_that_it_does_not_reach(make: Any) -> None:
    """The first micro-batch goes through `a`, then the run is left, and the second one goes through `b`."""
    reference = _Branches()
    (reference(torch.full((1, 4), 1.5), "a") + reference(torch.full((1, 4), 1.5), "b")).backward()
    sample_optimizer(reference).step()
    x = torch.full((1, 4), 1.0 + current_world().rank)
    runs = []
    for _ in range(2):
        strategy, model = make(auto_wrap_policy=is_linear), _Branches()
        bundle = Bundle(models=[model], optimizers=[sample_optimizer(model)])
        runs.append((strategy, strategy.prepare(bundle)))
    (left, saved), (resumed, made) = runs
    with left.without_sync(saved.models[0]):
        left.backward(saved.models[0](x, "a"))
    gradients = {name: place.take() for name, place in left.gradient_places(saved.models[0]).items()}
    resumed.note_held(made.models[0], True)
    for name, place in resumed.gradient_places(made.models[0]).items():
        place.give(gradients[name])
    resumed.backward(made.models[0](x, "b"))
    resumed.step(made.optimizers[0])
    state = resumed.state(made.models[0])
    torch.testing.assert_close(state or reference.state_dict(), reference.state_dict())


def _two_ranks(contracts: list[type[StrategyContract]], make: Any, folder: str) -> list[str]:
    ran = _contracts(contracts, folder)
    _resumed_run_exchanges_what_a_block_has_held_that_it_does_not_reach(make)
    return ran


def _hybrid_contracts(folder: str) -> list[str]:
    """Both in one set of four processes: starting them is what costs."""
    ran = _contracts([HybridFSDP1Contract], folder)
    if HAS_FSDP2:
        contract = HybridFSDP2Contract()
        for check in _HYBRID_CHECKS:
            getattr(contract, f"check_{check}")()
    return ran


_HYBRID_CHECKS = (
    "ten_steps",
    "micro_batches",
    "clip_norm",
    "clip_value",
    "same_start",
    "sync",
    "broken_window",
    "emptied_window",
    "left_out",
    "given_window",
    "precisions",
)
_CHECKS = [name for name in dir(StrategyContract) if name.startswith("test_")]


def test_fsdp1_keeps_the_strategy_contract(tmp_path: Any) -> None:
    pytest.importorskip("numpy", reason=_NEEDS_NUMPY)
    contracts = [FlatContract, BlocksContract, WholeContract]
    ran, _ = run_processes(2, _two_ranks, contracts, fsdp1, str(tmp_path), timeout_s=250)
    assert len(ran) == len(contracts) * len(_CHECKS)


@pytest.mark.skipif(not HAS_FSDP2, reason="this torch has no FSDP version 2 on a CPU")
def test_fsdp2_keeps_the_strategy_contract(tmp_path: Any) -> None:
    contracts = [FSDP2Contract, FSDP2BlocksContract]
    ran, _ = run_processes(2, _two_ranks, contracts, fsdp2, str(tmp_path))
    assert len(ran) == len(contracts) * len(_CHECKS)


def test_copies_of_a_sharded_model_keep_the_strategy_contract(tmp_path: Any) -> None:
    pytest.importorskip("numpy", reason=_NEEDS_NUMPY)
    ran, *_ = run_processes(4, _hybrid_contracts, str(tmp_path), timeout_s=250)
    assert len(ran) == len(_CHECKS)
