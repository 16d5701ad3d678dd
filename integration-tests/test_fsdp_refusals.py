"""What FSDP cannot do is an error on every rank, before anything is changed, and nobody hangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from sharded import BY_CLASS, HAS_FSDP2, Model, fsdp1, fsdp2, is_linear, make_blocks, raises_everywhere
from torch import nn

from acc_ops.options import OptionError
from acc_ops.testing import RankFailed, run_processes, run_threads
from acc_ops.world import current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.support import UnsupportedError


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def _what_version_1_cannot_do_is_refused_on_every_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    raises_everywhere(
        UnsupportedError, "in CPU memory already: leave cpu_offload", lambda: fsdp1(cpu_offload=True)
    )
    raises_everywhere(
        UnsupportedError, "use SHARDED_STATE_DICT", lambda: fsdp1(state_dict_type="LOCAL_STATE_DICT")
    )
    rank = current_world().rank
    raises_everywhere(
        ValueError,
        r"rank 0 has \('weight', \(2, 2\)",
        lambda: fsdp1().prepare(Bundle(models=[nn.Linear(2, 2 + rank)])),
    )
    split = nn.Linear(2, 2)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), init_device_mesh("cpu", (2,))))
    raises_everywhere(
        ValueError,
        "weight of Linear is split already.*fsdp_version=2",
        lambda: fsdp1().prepare(Bundle(models=[split])),
    )
    hybrid = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="HYBRID_SHARD")
    uneven = dataclasses.replace(current_world(), local_size=1 + rank, local_rank=0)
    raises_everywhere(
        ValueError, r"nodes of \[1, 2\] among 2 ranks", lambda: FSDP1Strategy(uneven, Precision(), hybrid)
    )
    version_2 = FullyShardedDataParallelPlugin(fsdp_version=2)
    raises_everywhere(
        ValueError, "needs fsdp_version=1", lambda: FSDP1Strategy(current_world(), Precision(), version_2)
    )


def _ranks_that_disagree_are_refused_before_anything_is_sent() -> None:
    rank = current_world().rank
    for mine, word in (
        ({"use_orig_params": bool(rank)}, "use_orig_params is False on rank 0 and True on rank 1"),
        (
            {"sharding_strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD")[rank]},
            "sharding_strategy is SHARD_GRAD_OP",
        ),
        (
            {"ignored_modules": "2" if rank else "1"},
            r"treat Sequential differently: \('1', 'ignored'\) on rank 0",
        ),
        ({"auto_wrap_policy": is_linear if rank else None}, "no '0' on rank 0"),
    ):
        raises_everywhere(ValueError, word, lambda mine=mine: fsdp1(**mine).prepare(Bundle(models=[_net()])))
    half = _net()
    half[2].requires_grad_(rank == 0)
    raises_everywhere(ValueError, "'trained'.*'frozen'", lambda: fsdp1().prepare(Bundle(models=[half])))
    other = FSDP1Strategy if rank else DDPStrategy
    plugin = (FullyShardedDataParallelPlugin(fsdp_version=1),) if rank else ()
    strategy = other(current_world(), Precision(), *plugin)
    raises_everywhere(
        ValueError,
        "the strategy is ddp on rank 0 and fsdp1 on rank 1",
        lambda: strategy.prepare(Bundle(models=[_net()])),
    )


def _what_pieces_cannot_be_is_refused() -> None:
    model = _net()
    lbfgs = torch.optim.LBFGS(model.parameters())
    raises_everywhere(
        ValueError,
        "LBFGS .*fsdp_version=2",
        lambda: fsdp1().prepare(Bundle(models=[model], optimizers=[lbfgs])),
    )
    complex_one = nn.ParameterDict({"c": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    raises_everywhere(
        ValueError,
        "c of ParameterDict holds numbers of torch.complex64",
        lambda: fsdp1().prepare(Bundle(models=[complex_one])),
    )


def _what_version_2_cannot_do_is_an_error_on_every_rank_and_changes_nothing() -> None:
    world = current_world()
    model = make_blocks()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="no module of a class 'Blok'"):
        fsdp2(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blok"]).prepare(
            Bundle(models=[model])
        )
    with pytest.raises(ValueError, match=r"would shard Model differently \(groups.a.0"):
        fsdp2(**(BY_CLASS if world.is_main else {})).prepare(Bundle(models=[model]))
    wrong = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Blok"]}
    with pytest.raises(OptionError, match=r"no module of a class"):  # on both
        fsdp2(**(wrong if world.rank == 1 else BY_CLASS)).prepare(Bundle(models=[model]))
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
            fsdp2(**mine).prepare(Bundle(models=[model]))
    other = choose_strategy(world, Precision()) if world.is_main else fsdp2()
    with pytest.raises(ValueError, match="the strategy is ddp on rank 0 and fsdp2 on rank 1"):
        other.prepare(Bundle(models=[model]))
    rprop = torch.optim.Rprop(model.parameters())
    with pytest.raises(ValueError, match="Rprop does not run on DTensors"):
        fsdp2().prepare(Bundle(models=[model], optimizers=[rprop]))
    with pytest.raises(ValueError, match="the ranks built different models"):
        fsdp2().prepare(Bundle(models=[nn.Linear(2 + world.rank, 1)]))
    assert type(model) is Model
    assert before == {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="make 8 ranks"):
        ParallelismConfig(dp_shard_size=4, tp_size=2).build_device_mesh("cpu")


def _what_is_wrong_on_one_rank_only_is_the_same_error_on_all() -> None:
    rank = current_world().rank
    ddp = partial(DDPStrategy, current_world(), Precision())
    versions: list[Callable[..., Strategy]] = [fsdp1, fsdp2] if HAS_FSDP2 else [fsdp1]
    for version in versions:
        strategy = version(auto_wrap_policy=_cannot_say if rank else is_linear)
        _refused(strategy, _net(), KeyError, "Linear")
    for made in [ddp, *versions]:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
        _refused(
            made(), model, ValueError, r"lr in group 0 of SGD is 0\.1 on rank 0 and 1\.1 on rank 1", optimizer
        )
        tied = _net()
        if rank:
            tied[1].weight = tied[0].weight
        _refused(made(), tied, ValueError, r"rank 1 has \('1\.weight'.*shared with 0\.weight")


def _modules_that_cannot_begin_are_an_error_on_all_ranks() -> None:
    class NoStart(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.is_cpu:
                raise KeyError("no start")

    def empty() -> nn.Module:
        with torch.device("meta"):
            return NoStart(2, 2)

    def first_only(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if current_world().rank:
            raise KeyError("no start")

    raises_everywhere(
        KeyError, "no start", lambda: fsdp1(param_init_fn=first_only).prepare(Bundle(models=[empty()]))
    )
    if HAS_FSDP2:
        raises_everywhere(KeyError, "no start", lambda: fsdp2().prepare(Bundle(models=[empty()])))


def _cannot_say(module: nn.Module) -> bool:
    raise KeyError(type(module).__name__)


def _refused(
    strategy: Strategy,
    model: nn.Module,
    error: type[Exception],
    match: str,
    *optimizers: torch.optim.Optimizer,
) -> None:
    """By the same error on every rank, and nothing was changed."""

    def looks() -> list[object]:
        return [*((name, type(part)) for name, part in model.named_modules()), *map(id, model.parameters())]

    before = looks()
    raises_everywhere(
        error, match, lambda: strategy.prepare(Bundle(models=[model], optimizers=list(optimizers)))
    )
    assert looks() == before


def _a_mesh_on_one_rank_only_is_an_error_on_all() -> None:
    if current_world().rank:
        with pytest.raises(ValueError, match=r"rank 0 is at another place.*the same parallelism_config"):
            ParallelismConfig(dp_replicate_size=2).build_device_mesh("cpu")
    else:
        with pytest.raises(ValueError, match="prepares under ddp, rank 1 is at another place"):
            DDPStrategy(current_world(), Precision()).prepare(Bundle(models=[_net()]))


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    checks = [
        _what_version_1_cannot_do_is_refused_on_every_rank,
        _ranks_that_disagree_are_refused_before_anything_is_sent,
        _what_pieces_cannot_be_is_refused,
        _what_is_wrong_on_one_rank_only_is_the_same_error_on_all,
        _modules_that_cannot_begin_are_an_error_on_all_ranks,
        _a_mesh_on_one_rank_only_is_an_error_on_all,
    ]
    if HAS_FSDP2:
        checks.append(_what_version_2_cannot_do_is_an_error_on_every_rank_and_changes_nothing)
    run_processes(2, _run_all, checks)


def test_ranks_that_are_threads_are_told_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"speaks through ThreadComm: use ReplicatedStrategy"):
        run_threads(2, fsdp1)


def _wait_for_a_model_that_one_rank_lacks() -> None:
    world = current_world()
    if world.rank == 1:
        raise RuntimeError("no model here")
    fsdp1().prepare(Bundle(models=[_net()]))


def test_a_rank_that_fails_before_prepare_is_named_and_nobody_hangs() -> None:
    with pytest.raises(RankFailed, match="no model here"):
        run_processes(2, _wait_for_a_model_that_one_rank_lacks, timeout_s=60)
