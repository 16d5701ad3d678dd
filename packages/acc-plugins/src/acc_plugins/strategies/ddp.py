"""torch's DistributedDataParallel: one model per process, gradients averaged while backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields as fields_of
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from acc_ops.comm import TorchComm
from acc_ops.world import World
from acc_plugins.options.kwargs import DistributedDataParallelKwargs
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.agreement import told
from acc_plugins.strategies.ddp_order import order_of, put_in_order
from acc_plugins.strategies.held import Own, SynchronisingStrategy
from acc_plugins.strategies.placing import is_dispatched
from acc_plugins.strategies.replicated import average_gradients
from acc_plugins.strategies.strategy import Bundle


class DDPStrategy(SynchronisingStrategy):
    """DistributedDataParallel over the world's process group. Evaluation bundles and models that train nothing are not wrapped."""

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        world: World,
        precision: Precision,
        *,
        options: DistributedDataParallelKwargs | None = None,
        save_on_each_node: bool = False,
    ) -> None:
        """Raises ValueError for a world that does not speak through torch.distributed."""
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        if not isinstance(world.comm, TorchComm):
            raise ValueError(
                f"DistributedDataParallel needs a torch.distributed process group, but this world speaks through "
                f"{type(world.comm).__name__}: use ReplicatedStrategy there"
            )
        self.options = options or DistributedDataParallelKwargs()
        self._group = world.comm.group
        self._unprepared: list[
            DistributedDataParallel
        ] = []  # forward ran under without_sync, backward shall synchronise
        # what torch does not average, by model
        self._frozen: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, nn.Parameter]]] = (
            weakref.WeakKeyDictionary()
        )

    def options_of_all_ranks(self) -> dict[str, str]:
        fields = ((field.name, getattr(self.options, field.name)) for field in fields_of(self.options))
        return {**super().options_of_all_ranks(), **{name: told(value) for name, value in fields}}

    def _prepare_model(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            super()._prepare_model(model.module, bundle)
            return model
        model = super()._prepare_model(model, bundle)
        if bundle.evaluation:
            return model
        frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._frozen[model] = frozen
        if len(frozen) == len(list(model.parameters())):
            return model
        sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
        if sharded:
            raise ValueError(
                f"{sharded[0]} of {type(model).__name__} is sharded (a DTensor), and DistributedDataParallel needs whole weights on every "
                "process: do not shard the model, or use a strategy for sharded models"
            )
        wrapped = DistributedDataParallel(
            model,
            device_ids=self._device_ids(model),
            process_group=self._group,
            **self.options.to_kwargs(),
        )
        self.options.register_comm_hook(wrapped)
        return wrapped

    def _device_ids(self, model: nn.Module) -> list[Any] | None:
        """The device to move inputs to; None on the CPU, and for a model that is spread over several devices."""
        kinds = {p.device for p in model.parameters()}
        if self.world.device.type == "cpu" or len(kinds) > 1 or is_dispatched(model):
            return None
        return [next(iter(kinds))]

    def without_sync(self, model: nn.Module, apart: bool = False) -> AbstractContextManager[Any]:
        """`DistributedDataParallel.no_sync`: enter it around the forward too, which is where torch looks.

        With `static_graph` the first backward of a model synchronises all the same: torch learns the graph from it, and fails without.
        """
        own: Any = self.window_of(model)
        return nullcontext() if own is not None and _still_learns(own) else super().without_sync(model, apart)

    def exchanges(self, model: nn.Module) -> bool:
        return isinstance(model, DistributedDataParallel)

    def held_back(self, model: Any) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = model.no_sync()
        return made

    def own_gradients(self, model: nn.Module) -> Own:
        return [p.grad for p in model.parameters()]

    def synchronises_now(self, model: Any) -> bool:
        """torch decides in the forward, which leaves its answer in `require_forward_param_sync`; behind one without gradients it looks as if it did not,
        and a step averages once more."""
        return bool(model.require_backward_grad_sync and model.require_forward_param_sync)

    def exchange_model(self, model: nn.Module) -> None:
        """Without the communication hook, which torch calls in a backward only."""
        average_gradients(self.world, (p for p in model.parameters() if p.requires_grad))

    def exchange_unreached(self, model: nn.Module, reached: Sequence[bool]) -> None:
        """With `find_unused_parameters` torch averages what was used in the window, as far as this process has seen it."""
        rest = [p for p, was in zip(model.parameters(), reached, strict=True) if p.requires_grad and not was]
        if rest:  # the same on every rank, as what torch averages is
            average_gradients(self.world, rest)

    def exchange_order(self, model: nn.Module) -> list[list[str]] | None:
        """DDP's buckets, see `ddp_order`."""
        own: Any = self.window_of(model)
        return None if own is None else order_of(own, self.world)

    def restore_exchange_order(self, model: nn.Module, order: list[list[str]] | None) -> bool:
        """Give DDP the buckets of the saved run."""
        own: Any = self.window_of(model)
        return order is None if own is None else put_in_order(own, order)

    @contextmanager
    def synchronised(self, model: Any) -> Iterator[None]:
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        self._unprepared.append(model)
        try:
            yield
        finally:
            self._unprepared.remove(model)
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate; gradients are averaged on the way unless their forward ran under `without_sync`."""
        for model in self._unprepared:
            # what DDP's forward does when it is not under no_sync; from the loss it finds the parameters that are not used
            model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
        super().backward(loss, divisor=divisor, **kwargs)
        for inner, frozen in self._frozen.items():
            trained = next((name for name, p in frozen if p.grad is not None), None)
            if trained is not None:
                raise RuntimeError(
                    f"{trained} of {type(inner).__name__} has a gradient, but was frozen when the model was prepared: DistributedDataParallel averages "
                    "only what requires a gradient then, so every process would train weights of its own. Call requires_grad_() before prepare, and "
                    "freeze again afterwards what shall wait (with find_unused_parameters=True)"
                )

    def close(self) -> None:
        super().close()
        self._frozen.clear()


def _still_learns(model: DistributedDataParallel) -> bool:
    """Whether torch has yet to see the graph that was promised to be static."""
    return model.static_graph and not getattr(model, "_static_graph_delay_allreduce_enqueued", True)
