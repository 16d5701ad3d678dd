"""FSDP version 2 on real gloo processes: the strategy contract, and what only shards can show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from acc_ops.testing import run_processes
from acc_ops.world import World, current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies import fsdp_utils
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.registry import choose_precision, choose_strategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import StrategyContract

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP version 2 on a CPU"
)


def _fsdp2(precision: Precision | None = None, **options: Any) -> FSDP2Strategy:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    strategy = choose_strategy(current_world(), precision or Precision(), fsdp=plugin)
    assert type(strategy) is FSDP2Strategy
    return strategy


class FSDP2Contract(StrategyContract):
    """The root alone, whole weights in files."""

    size = 2
    shows_local_gradients: ClassVar[bool] = False
    whole_files: ClassVar[bool] = False  # FSDP's own names
    options: ClassVar[dict[str, Any]] = {"state_dict_type": "FULL_STATE_DICT"}

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        return _fsdp2(precision, **self.options)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


class FSDP2BlocksContract(FSDP2Contract):
    """Every layer a unit that computes again in backward, shards in CPU memory and in files."""

    options: ClassVar[dict[str, Any]] = {
        "auto_wrap_policy": _is_linear,
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
        "cpu_offload": True,
        "reshard_after_forward": False,
    }
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp8")


class HybridContract(FSDP2Contract):
    """Two copies of a model that two ranks share each."""

    size = 4
    precisions: ClassVar[tuple[str, ...]] = ("fp16",)

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        mesh = parallelism.build_device_mesh("cpu")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=_is_linear)
        strategy = FSDP2Strategy(world, precision, plugin, mesh=mesh, parallelism=parallelism)
        assert strategy.sharding.shards.mesh_dim_names == ("dp_replicate", "dp_shard")
        return strategy


def _all_checks(contracts: list[type[StrategyContract]], folder: str) -> list[str]:
    torch.set_num_threads(1)
    return [name for contract in contracts for name in contract().run_on_this_rank(folder)]


def test_fsdp2_keeps_the_strategy_contract(tmp_path: Any) -> None:
    contracts = [FSDP2Contract, FSDP2BlocksContract]
    ran, _ = run_processes(2, _all_checks, contracts, str(tmp_path))
    tests = [name for name in dir(StrategyContract) if name.startswith("test_")]
    assert len(ran) == len(contracts) * len(tests)


def _hybrid_checks() -> None:
    torch.set_num_threads(1)
    contract = HybridContract()
    for check in (
        "ten_steps",
        "micro_batches",
        "clip_norm",
        "clip_value",
        "same_start",
        "sync",
        "precisions",
    ):
        getattr(contract, f"check_{check}")()


def test_copies_of_a_sharded_model_keep_the_strategy_contract() -> None:
    run_processes(4, _hybrid_checks)


def _run_all(functions: list[Callable[[], None]]) -> list[str]:
    torch.set_num_threads(1)
    for function in functions:
        function()
    return [function.__name__ for function in functions]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, size: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc = nn.Linear(size, size)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc(self.norm(x)).tanh())


class Model(nn.Module):
    """Blocks in lists and dictionaries, a scale without a dimension, and a buffer that no state dict holds."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.groups = nn.ModuleDict({"a": nn.ModuleList(Block(dropout=dropout) for _ in range(2))})
        self.last = Block(dropout=dropout)
        self.head = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.rand(16), persistent=False)
        if tied:
            self.head.weight = self.emb.weight
            self.last.fc.weight = self.groups["a"][0].fc.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in [*self.groups["a"], self.last]:
            x = block(x)
        out: Tensor = self.head(x) * self.scale + self.shift
        return out


BY_CLASS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
BY_SIZE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50}


def _made(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _trains_alike(
    strategy: Strategy, model: nn.Module, optimizer: Any, reference: nn.Module, own: Any, *, steps: int = 3
) -> None:
    """Losses, norms and weights of `model` on two shares of the batches are those of plain torch on the whole ones."""
    world = strategy.world
    for step in range(steps):
        tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = model(tokens.chunk(world.size)[world.rank]).square().mean()
        strategy.backward(loss)
        expected = reference(tokens).square().mean()
        expected.backward()
        mean = world.comm.all_reduce(loss.detach().clone()) / world.size
        torch.testing.assert_close(mean, expected.detach())
        norm = strategy.clip_norm(model.parameters(), 0.5)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
    pairs = zip(strategy.unwrap(model).named_parameters(), reference.named_parameters(), strict=True)
    for (name, p), (other, q) in pairs:
        assert name == other
        torch.testing.assert_close(_whole(p.detach()), q.detach())


def _prepared(strategy: Strategy, model: nn.Module, **more: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    reference = copy.deepcopy(model)
    optimizer, own = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
    made = strategy.prepare(Bundle(models=[model], optimizers=[optimizer], **more))
    return made.models[0], made.optimizers[0], reference, own


def every_policy_chooses_blocks_of_any_nesting_and_trains_alike() -> None:
    for options, units in (
        (BY_CLASS, ["", "groups.a.0", "groups.a.1", "last"]),
        (BY_SIZE, ["", "emb", "groups.a.0.fc", "groups.a.1.fc", "last.fc", "head"]),
        ({"auto_wrap_policy": _is_linear}, ["", "groups.a.0.fc", "groups.a.1.fc", "last.fc", "head"]),
        ({}, [""]),
    ):
        strategy = _fsdp2(**options)
        made = _prepared(strategy, _made())
        found = [name for name, part in made[0].named_modules() if isinstance(part, FSDPModule)]
        assert sorted(found) == sorted(units), (options, found)
        _trains_alike(strategy, *made)


def weights_that_units_share_stay_one() -> None:
    strategy = _fsdp2(**BY_CLASS)
    model, *others = _prepared(strategy, _made(tied=True))
    _trains_alike(strategy, model, *others)
    assert model.head.weight is model.emb.weight
    found = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert found == ["", "groups.a.1"]


def only_rank_0_has_the_weights() -> None:
    for tied in (False, True):
        model = _made(tied=tied)
        reference = copy.deepcopy(model)
        if not current_world().is_main:
            with torch.device("meta"):
                model = Model(tied=tied).double()
        strategy = _fsdp2(**BY_CLASS, cpu_ram_efficient_loading=True)
        kind = torch.optim.Adam if tied else torch.optim.Adagrad  # which makes its state at once, on meta too
        optimizer, own = (kind(m.parameters(), lr=0.01) for m in (model, reference))
        made = strategy.prepare(Bundle(models=[model], optimizers=[optimizer]))
        assert made.models[0].shift.equal(reference.shift)
        _trains_alike(strategy, made.models[0], made.optimizers[0], reference, own)
        assert (model.head.weight is model.emb.weight) == tied


def a_model_that_nobody_has_values_for_begins_as_its_modules_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        lost = Model()
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    strategy = _fsdp2()
    torch.manual_seed(5 + current_world().rank)
    (made,) = strategy.prepare(Bundle(models=[model])).models
    for (name, value), other in zip(made.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(_whole(value), other), name
    with pytest.raises(ValueError, match=r"scale of Model is on the meta device on rank 0.*reset_parameters"):
        strategy.prepare(Bundle(models=[lost]))


def frozen_weights_and_adapters_train_alike() -> None:
    model = _made()
    for name, p in model.named_parameters():
        p.requires_grad_(".fc.bias" in name or name == "head.weight")
    strategy = _fsdp2(**BY_CLASS)
    made = _prepared(strategy, model)
    _trains_alike(strategy, *made)
    assert [name for name, p in made[0].named_parameters() if p.requires_grad] == [
        name for name, p in made[2].named_parameters() if p.requires_grad
    ]


def ignored_modules_stay_whole_and_are_averaged() -> None:
    for ignored in (r"last|groups\.a\.1\.fc", "modules"):
        model = _made()
        said = ignored if ignored != "modules" else [model.last]
        strategy = _fsdp2(**BY_CLASS, ignored_modules=said)
        made = _prepared(strategy, model)
        names = [name for name, p in made[0].named_parameters() if not hasattr(p, "placements")]
        assert "scale" in names
        assert "last.fc.weight" in names
        assert "groups.a.0.fc.weight" not in names
        assert list(made[0].state_dict()) == list(made[2].state_dict())
        _trains_alike(strategy, *made)


def ignored_modules_may_be_unfrozen_later() -> None:
    model = _made()
    model.last.requires_grad_(False)
    strategy = _fsdp2(**BY_CLASS, ignored_modules="last")
    made = _prepared(strategy, model)
    for one in (made[0], made[2]):
        one.last.requires_grad_(True)
    _trains_alike(strategy, *made)


def running_statistics_are_rank_0_s() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    strategy = _fsdp2()
    (made,) = strategy.prepare(Bundle(models=[model])).models
    x = torch.full((3, 2), 1.0 + current_world().rank)
    with strategy.without_sync(made):
        strategy.backward(made(x).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.1 * x[0, 0].item())
    strategy.backward(made(x).sum())
    assert model[0].running_mean[0].item() == pytest.approx(0.19)
    assert model[0].num_batches_tracked.item() == 2


def complex_weights_are_clipped_with_the_others() -> None:
    values = torch.arange(8, dtype=torch.float64).view(4, 2)
    model = nn.ParameterDict(
        {"z": nn.Parameter(torch.complex(values, -values)), "x": nn.Parameter(values.clone())}
    )
    reference = copy.deepcopy(model)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = model

        def forward(self, x: Tensor) -> Tensor:
            return ((self.p["z"].abs() + self.p["x"]) * x).sum()

    strategy = _fsdp2()
    (made,) = strategy.prepare(Bundle(models=[Both()])).models
    for kind in (1.0, 2.0, float("inf")):
        made.zero_grad()
        reference.zero_grad()
        strategy.backward(made(values + 1))
        ((reference["z"].abs() + reference["x"]) * (values + 1)).sum().backward()
        norm = strategy.clip_norm(made.parameters(), 0.5, kind)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, kind))


def optimizers_follow_in_any_order_with_their_state_and_groups() -> None:
    for order in ("together", "optimizer first", "model first"):
        model = _made()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for step in range(2):  # a run that began before
            tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(10 + step))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reference, own = copy.deepcopy((model, optimizer))
        strategy = _fsdp2(**BY_CLASS)
        bundles = [Bundle(models=[model], optimizers=[optimizer])]
        if order != "together":
            bundles = [Bundle(optimizers=[optimizer]), Bundle(models=[model])]
        for bundle in bundles if order != "model first" else reversed(bundles):
            strategy.prepare(bundle)
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(group["params"]) for group in own.param_groups
        ]
        assert optimizer.state[model.head.weight]["exp_avg"].placements == model.head.weight.placements
        _trains_alike(strategy, model, optimizer, reference, own)


def models_of_several_prepares_share_a_backward_and_a_norm() -> None:
    models = [_made(seed) for seed in (1, 2)]
    references = copy.deepcopy(models)
    strategy = _fsdp2(**BY_CLASS)
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    own = torch.optim.SGD([p for m in references for p in m.parameters()], lr=0.1)
    strategy.prepare(Bundle(models=models[:1], optimizers=[optimizer]))
    strategy.prepare(Bundle(models=models[1:]))
    world = strategy.world
    tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(world.size)[world.rank]
    strategy.backward((models[0](mine) * models[1](mine)).mean())
    (references[0](tokens) * references[1](tokens)).mean().backward()
    for kind in (1.0, 2.0, 3.0, float("inf")):
        parameters = [p for m in models for p in m.parameters()]
        expected = [p for m in references for p in m.parameters()]
        norm = strategy.clip_norm(iter(parameters), 0.5, kind)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, 0.5, kind))
    optimizer.step()
    own.step()
    for p, q in zip(parameters, expected, strict=True):
        torch.testing.assert_close(_whole(p.detach()), q.detach())


def dropout_is_the_same_when_a_block_computes_again() -> None:
    gradients = []
    for again in (False, True):
        strategy = _fsdp2(**BY_CLASS, activation_checkpointing=again)
        model, *_ = _prepared(strategy, _made(dropout=0.5))
        torch.manual_seed(7)
        strategy.backward(model(torch.arange(16).view(4, 4)).square().mean())
        gradients.append([_whole(p.grad) for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def trained_weights_become_float32_under_mixed_precision_and_frozen_ones_do_not() -> None:
    model = _made().bfloat16()
    model.emb.requires_grad_(False)
    strategy = _fsdp2(choose_precision("bf16", "cpu"), **BY_CLASS)
    (made,) = strategy.prepare(Bundle(models=[model])).models
    assert {p.dtype for p in made.parameters() if p.requires_grad} == {torch.float32}
    assert made.emb.weight.dtype is torch.bfloat16
    seen: list[torch.dtype] = []
    made.last.fc.register_forward_hook(lambda fc, _, out: seen.extend((fc.weight.dtype, out.dtype)))
    out = made(torch.arange(8).view(2, 4))
    strategy.backward(out.mean())
    assert (out.dtype, seen) == (torch.float32, [torch.bfloat16, torch.bfloat16])


def what_cannot_be_is_an_error_on_every_rank_and_changes_nothing() -> None:
    world = current_world()
    model = _made()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="no module of a class 'Blok'"):
        _fsdp2(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blok"]).prepare(
            Bundle(models=[model])
        )
    with pytest.raises(ValueError, match=r"would shard Model differently \(groups.a.0"):
        _fsdp2(**(BY_CLASS if world.is_main else {})).prepare(Bundle(models=[model]))
    wrong = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Blok"]}
    with pytest.raises(ValueError, match=r"rank 1 cannot go on: |no module of a class"):
        _fsdp2(**(wrong if world.rank == 1 else BY_CLASS)).prepare(Bundle(models=[model]))
    for mine, word in (
        (
            {"reshard_after_forward": world.is_main},
            "reshard_after_forward is True on rank 0 and False on rank 1",
        ),
        ({"ignored_modules": "last" if world.is_main else None}, "'last', 'ignored'.*no 'last' on rank 1"),
        (
            {"state_dict_type": f"{'FULL' if world.is_main else 'SHARDED'}_STATE_DICT"},
            "state_dict_type is FULL",
        ),
    ):
        with pytest.raises(ValueError, match=word):
            _fsdp2(**mine).prepare(Bundle(models=[model]))
    other = choose_strategy(world, Precision()) if world.is_main else _fsdp2()
    with pytest.raises(ValueError, match="the strategy is ddp on rank 0 and fsdp2 on rank 1"):
        other.prepare(Bundle(models=[model]))
    rprop = torch.optim.Rprop(model.parameters())
    with pytest.raises(ValueError, match="Rprop does not run on DTensors"):
        _fsdp2().prepare(Bundle(models=[model], optimizers=[rprop]))
    with pytest.raises(ValueError, match="the ranks built different models"):
        _fsdp2().prepare(Bundle(models=[nn.Linear(2 + world.rank, 1)]))
    assert type(model) is Model
    assert before == {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="make 8 ranks"):
        ParallelismConfig(dp_shard_size=4, tp_size=2).build_device_mesh("cpu")


def a_model_for_evaluation_and_a_sharded_one_come_back_as_they_are() -> None:
    strategy = _fsdp2(**BY_CLASS)
    (judge,) = strategy.prepare(Bundle(models=[_made()], evaluation=True)).models
    assert type(judge) is Model
    (model,) = strategy.prepare(Bundle(models=[judge])).models
    assert isinstance(model, FSDPModule)
    parameters = list(model.parameters())
    (again,) = strategy.prepare(Bundle(models=[model])).models
    assert again is model
    assert all(p is q for p, q in zip(again.parameters(), parameters, strict=True))


def another_function_that_prepares_models_is_used() -> None:
    seen: list[Any] = []
    own = fsdp_utils.fsdp2_prepare_model

    def mine(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append((accelerator.state.fsdp_plugin.fsdp_version, accelerator.is_main_process))
        return own(accelerator, model)

    fsdp_utils.fsdp2_prepare_model = mine
    try:
        _prepared(_fsdp2(), _made())
    finally:
        fsdp_utils.fsdp2_prepare_model = own
    assert seen == [(2, current_world().is_main)]


def compiled_before_or_after_it_trains_alike() -> None:
    for compiled in (True, False):
        model, reference = _made(), _made()
        strategy = _fsdp2(**BY_CLASS)
        optimizer, own = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
        given = torch.compile(model, backend="eager") if compiled else model
        made = strategy.prepare(Bundle(models=[given], optimizers=[optimizer])).models[0]
        assert strategy.unwrap(made) is model
        if not compiled:
            made = torch.compile(made, backend="eager")
        with strategy.without_sync(made):
            strategy.backward(made(torch.arange(4).view(1, 4)).mean())
        assert all(p.grad is None for p in model.parameters() if hasattr(p, "placements"))
        with strategy.without_sync(made):
            strategy.backward(made(torch.arange(4).view(1, 4)).mean(), divisor=-1)  # takes the first back
        _trains_alike(strategy, made, optimizer, reference, own)


SCENARIOS = [
    every_policy_chooses_blocks_of_any_nesting_and_trains_alike,
    weights_that_units_share_stay_one,
    only_rank_0_has_the_weights,
    a_model_that_nobody_has_values_for_begins_as_its_modules_do,
    frozen_weights_and_adapters_train_alike,
    ignored_modules_stay_whole_and_are_averaged,
    ignored_modules_may_be_unfrozen_later,
    running_statistics_are_rank_0_s,
    complex_weights_are_clipped_with_the_others,
    optimizers_follow_in_any_order_with_their_state_and_groups,
    models_of_several_prepares_share_a_backward_and_a_norm,
    dropout_is_the_same_when_a_block_computes_again,
    trained_weights_become_float32_under_mixed_precision_and_frozen_ones_do_not,
    what_cannot_be_is_an_error_on_every_rank_and_changes_nothing,
    a_model_for_evaluation_and_a_sharded_one_come_back_as_they_are,
    another_function_that_prepares_models_is_used,
    compiled_before_or_after_it_trains_alike,
]


def test_what_only_shards_can_show() -> None:
    ran, _ = run_processes(2, _run_all, SCENARIOS)
    assert len(ran) == len(SCENARIOS)
