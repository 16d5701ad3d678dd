"""Both versions of FSDP over the present processes: strategies, a model of blocks, and what it means that it trains alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import whole
from torch import Tensor, nn

from acc_ops.world import current_world
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.fsdp1 import FSDP1Strategy
from acc_plugins.strategies.fsdp2 import FSDP2Strategy
from acc_plugins.strategies.registry import choose_strategy
from acc_plugins.strategies.strategy import Bundle, Strategy

HAS_FSDP2 = hasattr(torch.cpu.Stream, "record_event")  # else this torch has no version 2 on a CPU


def fsdp1(precision: Precision | None = None, **options: Any) -> FSDP1Strategy:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    return FSDP1Strategy(current_world(), precision or Precision(), plugin)


def fsdp2(precision: Precision | None = None, **options: Any) -> FSDP2Strategy:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    strategy = choose_strategy(current_world(), precision or Precision(), fsdp=plugin)
    assert type(strategy) is FSDP2Strategy
    return strategy


def raises_everywhere(error: type[Exception], match: str, function: Callable[[], object]) -> None:
    """On every rank the same error, and nobody waits."""
    with pytest.raises(error, match=match) as caught:
        function()
    told = current_world().comm.all_gather_object(str(caught.value))
    assert len(set(told)) == 1, told


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


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


def make_blocks(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


def trains_alike(
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
        torch.testing.assert_close(whole(p.detach()), q.detach())


def prepared(strategy: Strategy, model: nn.Module, **more: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    reference = copy.deepcopy(model)
    optimizer, own = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference))
    made = strategy.prepare(Bundle(models=[model], optimizers=[optimizer], **more))
    return made.models[0], made.optimizers[0], reference, own
