"""Tensor, context and sequence parallelism on real gloo processes: the numbers of one process that has everything, in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder import (
    MASK,
    TIME,
    Decoder,
    assert_same,
    batch_of,
    make_decoder,
    plain_loss,
    trained_alone,
    whole,
)
from torch import Tensor, nn

from acc_ops.testing import run_processes
from acc_ops.world import current_world


def _run_all(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _free_config(**sizes: int) -> Any:
    """A ParallelismConfig that allows copies beside split layers without shards, as MeshStrategy does."""
    from acc_plugins import ParallelismConfig

    class Free(ParallelismConfig):
        def _check_together(self) -> None:
            pass

    return Free(**sizes)


def _loss_under_context(
    strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any
) -> Tensor:
    """Places and masks by hand, as a model of one's own needs them; half of the places are here."""
    from acc_plugins.parallel.context import split_sequences
    from acc_plugins.parallel.exchange import line_of
    from acc_plugins.parallel.split import reach_of

    line, here = line_of(mesh, "cp"), TIME // mesh["cp"].size()
    places = torch.arange(TIME)[None]
    rows = [] if mask is None else [mask.clone()]
    buffers, dims = [*batch.values(), places, *rows], [1, 1, 1, *([0] if rows else [])]
    reach = reach_of(strategy.unwrap(model))
    with split_sequences([reach], line, buffers, dims):
        assert batch["ids"].shape[1] == here
        logits = model(batch["ids"], places, *rows)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        strategy.backward(loss)
    assert batch["ids"].shape[1] == places.shape[1] == TIME
    return loss


def _loss_under_heads(
    strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any
) -> Tensor:
    """A loader that cuts, and a loss that is weighed by hand, as scripts for sequence parallelism do."""
    from acc_plugins.parallel.exchange import line_of
    from acc_plugins.parallel.sequence import SplitLoader
    from acc_plugins.parallel.split import reach_of

    line = line_of(mesh, "sp")
    labels = torch.cat((batch["ids"][:, :1], batch["targets"][:, :-1]), 1)
    loader = SplitLoader([{"input_ids": batch["ids"], "labels": labels}], line)
    loader.tell(reach_of(strategy.unwrap(model)))
    (cut,) = loader
    assert cut["input_ids"].shape[1] == TIME // line.size
    logits = model(cut["input_ids"], cut["position_ids"], None if mask is None else mask)
    targets = cut["shift_labels"].flatten()
    total = line.mean((targets != -100).sum().double())
    loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / total
    strategy.backward(loss)
    return loss


def _loss_of_rows(strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any) -> Tensor:
    loss = plain_loss(model, batch["ids"], batch["targets"], mask)
    strategy.backward(loss)
    return loss


def _trains_as_one_process(
    mask: Tensor | None = None, recompute: bool = False, late: bool = False, **sizes: int
) -> None:
    """Losses of ten steps, the first gradients, clipping and the last weights."""
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.mesh import MeshStrategy
    from acc_plugins.strategies.strategy import Bundle

    config = _free_config(**sizes)
    mesh = config.build_device_mesh("cpu")
    world = current_world()
    strategy = MeshStrategy(world, Precision(), config, mesh=mesh)
    own = make_decoder(seed=world.rank, recompute=recompute)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    if late:
        (model,) = strategy.prepare(Bundle(models=[own])).models
        strategy.prepare(Bundle(optimizers=[optimizer]))
    else:
        (model,) = strategy.prepare(Bundle(models=[own], optimizers=[optimizer])).models
    expected, expected_gradients, expected_weights = trained_alone(mask=mask)
    shares = config.dp_replicate_size
    share = mesh["dp_replicate"].get_local_rank() if shares > 1 else 0
    loss_of = (
        _loss_under_context
        if config.cp_enabled
        else _loss_under_heads
        if config.sp_enabled
        else _loss_of_rows
    )
    comm = strategy.averaging.comm
    for step, loss_of_one in enumerate(expected):
        loss = loss_of(strategy, model, mesh, batch_of(step, share, shares), mask)
        told = comm.all_reduce(loss.detach().clone()) / comm.size
        assert told.item() == pytest.approx(loss_of_one, rel=1e-9), (step, sizes)
        if step == 0:
            assert_same({n: whole(p.grad) for n, p in own.named_parameters()}, expected_gradients)
        strategy.clip_norm(model.parameters(), 0.5)
        strategy.step(optimizer)
        optimizer.zero_grad()
    assert_same({n: whole(p.detach()) for n, p in own.named_parameters()}, expected_weights)
    assert own.head.weight is own.tokens.weight
    strategy.close()


def _layers_over_two() -> None:
    _trains_as_one_process(tp_size=2)
    _trains_as_one_process(tp_size=2, late=True, mask=MASK)


def _sequences_over_two() -> None:
    _trains_as_one_process(cp_size=2)
    _trains_as_one_process(cp_size=2, mask=MASK, recompute=True)


def _heads_over_two() -> None:
    _trains_as_one_process(sp_size=2)
    _trains_as_one_process(sp_size=2, mask=MASK, recompute=True)


def _mixes_over_four() -> None:
    _trains_as_one_process(dp_replicate_size=2, tp_size=2)
    _trains_as_one_process(dp_replicate_size=2, cp_size=2)
    _trains_as_one_process(sp_size=4)  # fewer heads of keys than ranks
    _trains_as_one_process(cp_size=4, mask=MASK)


def _accelerated(
    *, fsdp: bool = False, ignored: str | None = None, early: bool = False, **sizes: int
) -> None:
    """The same through an Accelerator: loaders that give ranks of one sample the same batch, metrics that count each sample once."""
    from torch.utils.data import DataLoader

    from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
    from acc_trainer import Accelerator

    config = ParallelismConfig(**sizes)
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=None, ignored_modules=ignored)
        if fsdp
        else None
    )
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    ranks, shares, steps = accelerator.num_processes, config.data_parallel_size, 10
    samples = [
        {"ids": i, "targets": t} for n in range(steps) for i, t in zip(*batch_of(n).values(), strict=True)
    ]
    for number, sample in enumerate(samples):
        sample["number"] = torch.tensor(number)
    loader = DataLoader(samples, batch_size=4 // shares)
    own = make_decoder(seed=accelerator.process_index)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    if early:
        assert accelerator._prepare_cp(own, loader) == (own, loader)
    model, optimizer, loader = accelerator.prepare(own, optimizer, loader)
    names = [name for name, _ in own.named_parameters()]
    expected, expected_gradients, expected_weights = trained_alone(steps)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        numbers = batch.pop("number")
        loss = _loss_by_accelerator(accelerator, model, batch)
        assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(expected[step], rel=1e-9)
        if step == 0:
            gradients = {n: whole(p.grad) for n, p in zip(names, model.parameters(), strict=True)}
            assert_same(gradients, expected_gradients)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(numbers).tolist()
        told = accelerator.gather_for_metrics([str(number) for number in numbers.tolist()])
        assert sorted(map(int, told)) == sorted(seen[-4:]), (told, ranks)
    assert sorted(seen) == list(range(4 * steps))
    weights = {n: whole(p.detach()) for n, p in zip(names, model.parameters(), strict=True)}
    assert_same(weights, expected_weights)
    accelerator.end_training()


def _loss_by_accelerator(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of this rank's part, differentiated."""
    config = accelerator.parallelism_config
    if config.sp_enabled:
        strategy = SimpleNamespace(backward=accelerator.backward, unwrap=accelerator.unwrap_model)
        return _loss_under_heads(strategy, model, accelerator.torch_device_mesh, batch, None)
    places = torch.arange(TIME)[None].repeat(len(batch["ids"]), 1)
    buffers = [*batch.values(), places] if config.cp_enabled else None
    with accelerator.maybe_context_parallel(buffers, [1] * 3 if buffers else None):
        logits = model(batch["ids"], places)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        accelerator.backward(loss)
    return loss


def _by_accelerators_over_two() -> None:
    _accelerated(tp_size=2)
    _accelerated(cp_size=2)
    _accelerated(sp_size=2)
    _accelerated(cp_size=2, fsdp=True)
    _accelerated(sp_size=2, fsdp=True)


def _by_accelerators_over_four() -> None:
    _accelerated(dp_shard_size=2, tp_size=2, fsdp=True)
    _accelerated(dp_shard_size=2, tp_size=2, fsdp=True, ignored=r"blocks\.0")  # split, and not sharded
    _accelerated(dp_shard_size=2, cp_size=2, fsdp=True)
    _accelerated(dp_shard_size=2, sp_size=2, fsdp=True)
    _accelerated(dp_replicate_size=2, dp_shard_size=2, fsdp=True)
    _accelerated(cp_size=2, tp_size=2, fsdp=True)
    _accelerated(dp_replicate_size=2, sp_size=2)
    _accelerated(tp_size=2, cp_size=2, early=True)  # by the private name that other projects call


def _what_cannot_be_split_is_an_error_everywhere() -> None:
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.mesh import MeshStrategy
    from acc_plugins.strategies.strategy import Bundle

    world = current_world()
    config = _free_config(tp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    model: Any = make_decoder()
    if world.rank == 1:  # a plan that only one rank has
        model.tp_plan = {**Decoder.tp_plan, "blocks.*.up": "moe_tp_experts"}
    before = [id(p) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"would treat Decoder differently.*'colwise'.*'moe_tp_experts'"):
        strategy.prepare(Bundle(models=[model]))
    model.tp_plan = {**Decoder.tp_plan, "blocks.*.up": "moe_tp_experts"}
    with pytest.raises(ValueError, match=r"blocks\.1\.up: the style 'moe_tp_experts' is not known"):
        strategy.prepare(Bundle(models=[model]))
    assert [id(p) for p in model.parameters()] == before
    config = _free_config(cp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    if world.rank == 1:  # what only one rank has
        model.config = SimpleNamespace(_attn_implementation="eager")
    with pytest.raises(ValueError, match="computes attention by 'eager'") as caught:
        strategy.prepare(Bundle(models=[model]))
    assert (str(caught.value.__cause__) == "rank 1 raised this") == (world.rank == 0)
    for layer, why in (
        (nn.LSTM(2, 2), r"1 \(LSTM\) is recurrent"),
        (nn.Conv1d(2, 2, 3), "mixes 3 neighbouring places"),
        (nn.MultiheadAttention(2, 1), "attends to this rank's places only"),
    ):
        with pytest.raises(ValueError, match=why):
            strategy.prepare(Bundle(models=[nn.Sequential(nn.Linear(2, 2), layer)]))
    for options, why in (({"dp_shard_size": 2}, "which FSDP2 does"), ({"tp_size": 2}, "needs a mesh")):
        with pytest.raises(ValueError, match=why):
            MeshStrategy(
                world, Precision(), _free_config(**options), mesh=None if "tp_size" in options else object()
            )


def _a_compiled_model_is_reached_too() -> None:
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    own = make_decoder()
    model = torch.compile(accelerator.prepare(own), backend="eager")
    batch, places = batch_of(0), torch.arange(TIME)[None].repeat(4, 1)
    with accelerator.maybe_context_parallel([*batch.values(), places], [1] * 3):
        scores = model(batch["ids"], places).flatten(0, 1)
        accelerator.backward(F.cross_entropy(scores, batch["targets"].flatten()))
    _, expected, _ = trained_alone(1)
    assert_same({name: whole(p.grad) for name, p in own.named_parameters()}, expected)
    accelerator.end_training()


def _ranks_that_split_differently_are_told() -> None:
    from acc_plugins import ParallelismConfig
    from acc_plugins.parallel import set_plan
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    rank = accelerator.process_index
    accelerator.prepare(make_decoder())
    for length, width in ((8 + 2 * rank, 1), (8, 1 + rank), (8 + rank, 1)):
        buffer = torch.zeros(width, length)
        with pytest.raises(ValueError, match=r"same shapes|another rank cannot cut|9 places"):
            accelerator.maybe_context_parallel([buffer], [1])
        assert buffer.shape == (width, length)
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    own = nn.Sequential(nn.Linear(4, 4))
    set_plan(own, {"0": "colwise" if rank else "colwise_gather_output"})
    with pytest.raises(ValueError, match=r"'colwise_gather_output'. on rank 0, .'0', 'colwise'. on rank 1"):
        accelerator.prepare(own)
    assert own[0].weight.shape == (4, 4)
    accelerator.end_training()


def _what_is_unfrozen_later_is_averaged() -> None:
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    own = nn.Linear(2, 1).requires_grad_(False)
    model = accelerator.prepare(own)
    own.requires_grad_(True)
    accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
    assert own.weight.grad is not None
    assert own.weight.grad.tolist() == [[0.5, 0.5]]
    accelerator.end_training()


def test_two_processes_train_as_one_does() -> None:
    run_processes(
        2,
        _run_all,
        [
            _layers_over_two,
            _sequences_over_two,
            _heads_over_two,
            _by_accelerators_over_two,
            _what_cannot_be_split_is_an_error_everywhere,
            _a_compiled_model_is_reached_too,
            _ranks_that_split_differently_are_told,
            _what_is_unfrozen_later_is_averaged,
        ],
    )


def test_four_processes_train_as_one_does() -> None:
    run_processes(4, _run_all, [_mixes_over_four, _by_accelerators_over_four], timeout_s=240)
