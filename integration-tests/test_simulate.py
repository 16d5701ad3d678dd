"""The simulator against the real thing: the same step on gloo processes, what each rank holds and what it sends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from acc_plugins.precisions.precision import Precision
from acc_plugins.simulate import Traffic, simulate
from acc_plugins.simulate.memory import SavedForBackward, bytes_of
from acc_plugins.simulate.traffic import TrafficCounter
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Bundle

_WIDTH, _WORDS = 20, 50  # 4 ranks do not divide all of the sizes
_TIMES = (2, 12)  # words of each of the rows of a rank's batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Words(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.table = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _WORDS)
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def _plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )


def _cases(size: int) -> list[tuple[dict[str, int], dict[str, Any] | None]]:
    """Sizes of the axes, and options of FSDP where it shards."""
    if size == 2:
        return [
            ({"dp_shard_size": 2}, {}),
            ({"dp_shard_size": 2}, {"reshard_after_forward": False}),
            ({"tp_size": 2}, None),
        ]
    return [
        ({"dp_shard_size": 4}, {}),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, {}),
        ({"dp_shard_size": 2, "tp_size": 2}, {}),
        ({"tp_size": 4}, None),
    ]


def _really(sizes: dict[str, int], options: dict[str, Any] | None) -> dict[str, Any]:
    """One step on this rank: what it holds and what passes."""
    from dataclasses import replace

    config = ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    world = replace(current_world(), mesh=mesh)
    plugin = None if options is None else _plugin(**options)
    strategy = choose_strategy(world, Precision(), fsdp=plugin, parallelism=config)
    torch.manual_seed(0)
    model: Any = Words()
    made = strategy.prepare(Bundle(models=[model], optimizers=[torch.optim.AdamW(model.parameters())]))
    (model,), (optimizer,) = made.models, made.optimizers
    assert mesh is not None
    axes = {mesh[axis].get_group().group_name: axis for axis in config.active_mesh_dims}
    if len(axes) > 1 and "tp" not in axes.values():  # all of them at once
        axes[dist.group.WORLD.group_name] = "+".join(axes.values())
    batch = torch.zeros(_TIMES, dtype=torch.long)
    with TrafficCounter(axes) as counter, SavedForBackward(model, batch) as saved:
        loss = model(batch)
    with counter:
        strategy.backward(loss)
    gradients = bytes_of(p.grad for p in model.parameters())
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "weights": bytes_of(model.parameters()),
        "buffers": bytes_of(model.buffers()),
        "gradients": gradients,
        "optimizer": bytes_of(states),
        "traffic": counter.traffic(),
        "activations": saved.nbytes(),
    }


def _all_of(size: int) -> list[dict[str, Any]]:
    try:
        return [_really(sizes, options) for sizes, options in _cases(size)]
    finally:
        dist.barrier()


def _check(size: int) -> None:
    on_rank_0 = run_processes(size, _all_of, size)[0]
    for (sizes, options), real in zip(_cases(size), on_rank_0, strict=True):
        plugin = None if options is None else _plugin(**options)
        told = simulate(
            Words,
            torch.zeros(_TIMES, dtype=torch.long),
            world_size=size,
            parallelism=ParallelismConfig(**sizes),
            fsdp_plugin=plugin,
        )
        for name in ("weights", "buffers", "gradients", "optimizer"):
            assert getattr(told, name) == real[name], (sizes, name)
        if plugin is None:  # under FSDP autograd keeps gathered weights, too
            assert told.activations == real["activations"], sizes
        sent: tuple[Traffic, ...] = real["traffic"]
        assert told.traffic == sent, sizes


def test_two_ranks_hold_and_send_what_was_told() -> None:
    _check(2)


def test_four_ranks_hold_and_send_what_was_told() -> None:
    _check(4)
