"""What the strategy contract asks of a strategy, and how its checks train: models, shares of a batch, comparisons.

[Note: what a strategy may say about itself] Overriding these is enough for a strategy whose weights are shards or whose ranks share samples:

    make_strategy          how it is made, for one rank
    data_place             which share of the global batch this rank has; ranks that share samples have the same
    model, batch           a model in float64 and the global batch for it, where three linear layers are not enough
    loss                   a forward and a loss, where a rank has a part of each sequence
    whole_gradients        gradients by name, whole, where `p.grad` is neither a plain tensor nor a DTensor
    shows_local_gradients  False where gradients that are not synchronised stay inside the engine
    whole_files            False where weights are saved in shards
    precisions             those it works with

Ranks are threads. In processes that form a group already, `run_on_this_rank` runs every test there, which saves starting processes for each.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from acc_ops.collectives import barrier
from acc_ops.testing import run_threads
from acc_ops.world import World, current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.contract_samples import (
    Reference,
    Tied,
    sample_batch,
    sample_model,
    sample_optimizer,
)
from acc_plugins.strategies.strategy import Bundle, Strategy


class ContractBase:
    """What a strategy says about itself, and what the checks have in common."""

    size: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    rtol: ClassVar[float] = 1e-9
    shows_local_gradients: ClassVar[bool] = True
    whole_files: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ("no", "bf16", "fp16", "fp8")

    _here = False  # this process is a rank

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        """The strategy under test, for one rank."""
        raise NotImplementedError

    def on_ranks(self, check: str, *args: Any) -> None:
        """Run the method called `check` on every rank."""
        if self._here:
            getattr(self, check)(*args)
        else:
            run_threads(self.size, lambda: getattr(self, check)(*args), device=self.device)

    def run_on_this_rank(self, folder: str) -> list[str]:
        """Every test on this rank, whose process is one of a group; their names. `folder` is the same on all ranks."""
        self._here = True
        ran = []
        for name in sorted(name for name in dir(self) if name.startswith("test_")):
            test = getattr(self, name)
            if inspect.signature(test).parameters:
                own = Path(folder, type(self).__name__, name)
                own.mkdir(parents=True, exist_ok=True)
                test(own)
            else:
                test()
            ran.append(name)
        return ran

    def data_place(self, world: World) -> tuple[int, int]:
        """Which share of the global batch this rank trains on, and how many shares there are."""
        return world.rank, world.size

    def model(self, seed: int = 0) -> nn.Module:
        """The model to train, in float64, the same for the same seed."""
        return sample_model(seed)

    def tied_model(self) -> nn.Module:
        """One of two layers that share a weight."""
        return Tied()

    def batch(self) -> tuple[Tensor, Tensor]:
        """The global batch: what the model takes, and what it shall return. Its first dimension is shared out."""
        return sample_batch()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Of this rank's samples, or its part of them; the mean over all ranks must be the loss of the whole batch."""
        return mse_loss(model(x), y)

    def whole_gradients(self, strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
        """The gradients after a synchronising backward by the user's own names, whole; called on every rank."""
        named = strategy.unwrap(model).named_parameters()
        return {name: _whole(p.grad) for name, p in named if p.grad is not None}

    def strategy(self, precision: Precision | None = None) -> Strategy:
        """A new one for the current rank."""
        return self.make_strategy(current_world(), precision or Precision())

    def _prepared(
        self,
        precision: Precision | None = None,
        *,
        adam: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Strategy, nn.Module, Any]:
        strategy = self.strategy(precision)
        model = self.model(seed).to(dtype)
        got = strategy.prepare(Bundle(models=[model], optimizers=[sample_optimizer(model, adam=adam)]))
        return strategy, got.models[0], got.optimizers[0]

    def _reference(self, *, adam: bool = False, dtype: torch.dtype = torch.float64) -> Reference:
        x, y = self.batch()
        return Reference(self.model().to(dtype), (x.to(dtype), y.to(dtype)), adam=adam)

    def _share(self, world: World, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        index, count = self.data_place(world)
        x, y = (part.chunk(count)[index].to(world.device, dtype) for part in self.batch())
        return x, y

    def _accumulate(self, strategy: Strategy, model: nn.Module, dtype: torch.dtype = torch.float64) -> float:
        """Forward and backward of this rank's share in two micro-batches, the first without synchronising; the loss of the whole batch."""
        x, y = self._share(strategy.world, dtype)
        total = torch.zeros((), dtype=torch.float64, device=strategy.world.device)
        for i, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            with strategy.without_sync(model) if i == 0 else nullcontext():
                loss = self.loss(model, part, target)
                strategy.backward(loss, divisor=2)
            total += loss.detach() / 2
        return (strategy.world.comm.all_reduce(total) / strategy.world.size).item()

    def _train(self, strategy: Strategy, model: nn.Module, optimizer: Any, *, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self._accumulate(strategy, model))
            strategy.step(optimizer)
            optimizer.zero_grad()
        return losses

    def _save(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Any,
        folder: str,
        names: tuple[str, str],
        *,
        safe: bool = True,
    ) -> None:
        """What a checkpoint does: what hooks are shown is what is written."""
        strategy.save_model(model, strategy.state_for_hooks(model), folder, names[0], safe=safe)
        strategy.save_optimizer(optimizer, folder, names[1])
        barrier(strategy.world)

    def _assert_state(self, strategy: Strategy, model: nn.Module, expected: Any) -> None:
        """Whole weights, on rank 0 at least."""
        state = strategy.state(model)
        if state or strategy.world.is_main:
            self._assert_close(state, expected)

    def _assert_close(self, got: Any, expected: Any) -> None:
        assert list(got) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name].cpu(),
                value.cpu(),
                rtol=self.rtol,
                atol=self.rtol,
                msg=functools.partial("{}: {}".format, name),
            )


def _whole(gradient: Tensor) -> Tensor:
    """The whole of a DTensor, which every rank must ask for; a plain tensor as it is."""
    full_tensor = getattr(gradient, "full_tensor", None)
    return gradient if full_tensor is None else full_tensor()
