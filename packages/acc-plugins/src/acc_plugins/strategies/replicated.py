"""One model per rank, gradients averaged through the world's own Comm: for ranks that are threads, and the reference for DDP.

[Note: what it does and when] At `prepare` every rank takes rank 0's weights and buffers. At the end of each `backward` that synchronises, the
gradients of all prepared models are averaged (one collective per dtype), then rank 0's buffers go out. Averaging a gradient that is the same
everywhere changes nothing, so gradients that another backward averaged before come out right, also while they accumulate. A gradient
that only some ranks have counts as zero on the others; one that no rank has stays None. Nothing overlaps with backward: DDP is faster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from acc_ops.world import World
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.spread import is_dtensor
from acc_plugins.strategies.clip import local_part, unique_parameters
from acc_plugins.strategies.held import Own, SynchronisingStrategy
from acc_plugins.strategies.strategy import Bundle


class AveragingStrategy(SynchronisingStrategy):
    """Averages the gradients of what it trains over the ranks of `averaging`, in `backward` of the strategy."""

    averaging: World  # who has another share of the data and the same weights
    broadcast_buffers: bool = True

    def __init__(self, world: World, precision: Precision, *, save_on_each_node: bool = False) -> None:
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        self.averaging = world
        self._held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def _begin_training(self, model: nn.Module) -> None:
        """Every rank has the first one's weights from here on, and its gradients are averaged."""
        buffers = model.buffers() if self.broadcast_buffers else ()
        take_from_rank_0(self.averaging, [t for t in (*model.parameters(), *buffers) if not t.is_meta])

    def exchanges(self, model: nn.Module) -> bool:
        return model in self._training

    def held_back(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._hold(model, self._held.get(model, 0) + 1)

    def synchronised(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._hold(model, 0)

    @contextmanager
    def _hold(self, model: nn.Module, depth: int) -> Iterator[None]:
        before = self._held.get(model, 0)
        self._held[model] = depth
        try:
            yield
        finally:
            self._held[model] = before

    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate, then average the gradients of every training model that is not under `without_sync`."""
        super().backward(loss, divisor=divisor, **kwargs)
        if self.averaging.size == 1:
            return
        models = [model for model in self._training if self.synchronises_now(model)]
        if models:
            trained = (p for model in models for p in model.parameters() if p.requires_grad)
            average_gradients(self.averaging, trained)
            if self.broadcast_buffers:
                take_from_rank_0(
                    self.averaging, [b for model in models if model.training for b in model.buffers()]
                )

            for model in models:  # also those that this backward did not reach
                self._windows.close(model)

    def own_gradients(self, model: nn.Module) -> Own:
        return [p.grad for p in model.parameters()]

    def synchronises_now(self, model: nn.Module) -> bool:
        return not self._held.get(model, 0)

    def exchange_model(self, model: nn.Module) -> None:
        average_gradients(self.averaging, (p for p in model.parameters() if p.requires_grad))

    def exchange_unreached(self, model: nn.Module, reached: Sequence[bool]) -> None:
        """`backward` averages all that the model has."""

    def close(self) -> None:
        super().close()
        self._held.clear()


class ReplicatedStrategy(AveragingStrategy):
    """Data parallel over any Comm. Synchronises in `backward` of the strategy, not in a `loss.backward()` of the user's own."""

    name: ClassVar[str] = "replicated"

    def __init__(
        self,
        world: World,
        precision: Precision,
        *,
        broadcast_buffers: bool = True,
        save_on_each_node: bool = False,
    ) -> None:
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        self.broadcast_buffers = broadcast_buffers

    def options_of_all_ranks(self) -> dict[str, str]:
        return {**super().options_of_all_ranks(), "broadcast_buffers": str(self.broadcast_buffers)}

    def _prepare_model(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        model = super()._prepare_model(model, bundle)
        if not bundle.evaluation:
            self._begin_training(model)
        return model


def average_gradients(world: World, parameters: Iterable[Tensor]) -> None:
    """Average the gradients over all ranks, in place. One that only some ranks have counts as zero on the others.

    Raises ValueError on all of them for a gradient that is sparse on one.
    """
    trained = unique_parameters(parameters)
    has_gradient = torch.tensor([_kind(p.grad, world) for p in trained], dtype=torch.int32)
    on_ranks = world.comm.all_reduce(has_gradient.to(world.comm.control_device)).tolist()
    for p, count in zip(trained, on_ranks, strict=True):
        if count > world.size:
            raise ValueError(
                f"a gradient of shape {tuple(p.shape)} is sparse on {count // (world.size + 1)} of {world.size} ranks, and only the backward of "
                "DistributedDataParallel averages those, at the end of a window that is not broken off: build the layer with sparse=False, or train "
                "with DistributedDataParallel (processes, not threads) and step behind a backward that synchronises"
            )
    used = [p for p, count in zip(trained, on_ranks, strict=True) if count]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    gradients = [local_part(p.grad) for p in used if p.grad is not None]
    _coalesced(gradients, lambda flat: world.comm.all_reduce(flat).div_(world.size))


def _kind(gradient: Tensor | None, world: World) -> int:
    """0: none, 1: dense, more than all ranks' dense ones together: sparse."""
    return 0 if gradient is None else 1 if gradient.layout is torch.strided else world.size + 1


def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Make the sums over ranks that split layers have left to be made in gradients, in place. Every rank calls it."""
    for p in unique_parameters(parameters):
        gradient: Any = p.grad
        if (
            gradient is not None
            and is_dtensor(gradient)
            and any(one.is_partial() for one in gradient.placements)
        ):
            like: Any = p
            p.grad = gradient.redistribute(placements=like.placements)


def take_from_rank_0(world: World, tensors: list[Tensor]) -> None:
    """Give `tensors` the values they have on rank 0, in place."""
    _coalesced(
        [local_part(tensor.detach()) for tensor in tensors], lambda flat: world.comm.broadcast(flat, 0)
    )


def _coalesced(tensors: list[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
    """Run `exchange` once per dtype and device over all `tensors` laid end to end, and write the result back into them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for group in groups.values():
            flat = exchange(torch.cat([tensor.detach().reshape(-1) for tensor in group]))
            for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
