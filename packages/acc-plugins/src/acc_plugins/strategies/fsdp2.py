"""torch's FSDP, version 2: every parameter is a DTensor of which each rank keeps its shard, gathered where it is computed with.

[Note: which optimizer has which parameter] `fully_shard` makes new parameters. An optimizer that was built before `prepare` is given those in the place of
the old ones, in the same groups, with its state sharded alike; which optimizers and models come together in one `prepare`, and in which order,
does not matter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from acc_ops.collectives import barrier
from acc_ops.enums import FP8BackendType
from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.parallel.split import sharers_of
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.spread import is_dtensor
from acc_plugins.strategies import fsdp_utils, gradients
from acc_plugins.strategies.agreement import Facts
from acc_plugins.strategies.begun_states import give_values
from acc_plugins.strategies.buffers import SharedBuffers
from acc_plugins.strategies.fsdp2_mesh import shard_mesh
from acc_plugins.strategies.fsdp2_optimizers import follow_shards, letting_go
from acc_plugins.strategies.fsdp2_sharding import Sharding, parameters_apart, uncompiled
from acc_plugins.strategies.fsdp_plugin import check_made_for, told_ignored, told_options
from acc_plugins.strategies.held import Own, SynchronisingStrategy
from acc_plugins.strategies.optimizer_kinds import check_for_dtensors
from acc_plugins.strategies.replicated import average_gradients, sum_partial_gradients
from acc_plugins.strategies.sharded import ShardedStrategy, mesh_text, told_plan
from acc_plugins.strategies.strategy import Bundle
from acc_plugins.support import UnsupportedError


class FSDP2Strategy(SynchronisingStrategy, ShardedStrategy):
    """`fully_shard` over the world's process group, or over the axes of a mesh. Models of an evaluation bundle are not sharded."""

    name: ClassVar[str] = "fsdp2"
    changes_modules_in_place: ClassVar[bool] = True
    can_train_apart: ClassVar[bool] = False

    def __init__(
        self,
        world: World,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        *,
        mesh: DeviceMesh | None = None,
        parallelism: ParallelismConfig | None = None,
        save_on_each_node: bool = False,
    ) -> None:
        """`mesh` has the axes of `parallelism`; without them models are sharded over all ranks.

        Raises ValueError for a plugin of version 1, a world without torch.distributed, and fp8 weights that only rank 0 has read;
        UnsupportedError on a CPU with a torch that cannot.
        """
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        check_made_for(plugin, 2, world)
        if world.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise UnsupportedError(
                f"FSDP version 2 does not run on a CPU with torch {torch.__version__}, whose CPU streams cannot record events: install torch 2.13, "
                "or give fsdp_version=1"
            )
        if precision.fp8_backend is FP8BackendType.AO and plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "cpu_ram_efficient_loading does not work with mixed_precision='fp8' through torchao, whose weights are no plain tensors: turn "
                "one of them off"
            )
        self.plugin = plugin
        self.state_dict_type = plugin.state_dict_type.name
        self.sharding = Sharding(
            plugin=plugin,
            world=world,
            shards=shard_mesh(world, mesh, parallelism),
            mesh=mesh,
            parallelism=parallelism,
            mixed_precision=precision.name,
        )
        self._sharers = world if mesh is None else sharers_of(world, mesh)  # of what is not sharded
        self._became: Any = WeakTensorKeyDictionary()  # a parameter before it was sharded -> the DTensor
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._apart: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._buffers = SharedBuffers(self._sharers)
        precision.agree_over(world)

    # 1
    def options_of_all_ranks(self) -> dict[str, str]:
        mesh = mesh_text(self.sharding.mesh or self.sharding.shards)
        return {
            **super().options_of_all_ranks(),
            **told_options(self.plugin),
            "parallelism_config": mesh,
        }

    def treatment(self, model: nn.Module) -> Facts:
        parallelism = self.sharding.parallelism
        plan = told_plan(model) if parallelism is not None and parallelism.tp_enabled else []
        return [*told_ignored(model, self.plugin), *plan]

    def shard(self, bundle: Bundle) -> Bundle:
        """Each model sharded, in place; optimizers, also those of an earlier `prepare`, with the new parameters."""
        check_for_dtensors(bundle.optimizers)
        self._optimizers.update(bundle.optimizers)
        give_values(bundle.optimizers, self.world)
        for optimizer in bundle.optimizers:
            follow_shards(optimizer, self._became)
        with letting_go(self._optimizers, map(uncompiled, bundle.models)):
            models = [self._prepare_model(model, bundle) for model in bundle.models]
        return replace(
            bundle, models=models, optimizers=list(bundle.optimizers), schedulers=list(bundle.schedulers)
        )

    def _prepare_model(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        inner = uncompiled(model)
        if bundle.evaluation and not isinstance(inner, FSDPModule):
            return super()._prepare_model(model, bundle)
        before = {name: weakref.ref(p) for name, p in inner.named_parameters(remove_duplicate=False)}
        self.precision.wrap(inner)
        try:  # read there: projects replace it
            made = fsdp_utils.fsdp2_prepare_model(self.as_accelerator(), model)
        except BaseException:
            self.precision.unwrap(inner)
            raise
        inner = uncompiled(made)
        kept = {
            id(p) for p in parameters_apart(inner, self.plugin)
        }  # split layers among them are DTensors, too
        apart = []
        for name, p in inner.named_parameters(remove_duplicate=False):
            old = before[name]() if name in before else None
            if old is not None and old is not p:  # an optimizer has it that was not prepared yet
                self._became[old] = p
            if id(p) in kept or not is_dtensor(p):
                apart.append(p)
        if apart:
            self._apart[inner] = apart
        if not bundle.evaluation:
            self._buffers.watch(inner)
        return made

    def as_accelerator(self) -> Any:
        """What functions that take an accelerator ask of it."""
        return SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=self.plugin, mixed_precision=self.precision.name),
            sharding=self.sharding,
            world=self.world,
            device=self.world.device,
            is_fsdp2=True,
            is_main_process=self.world.is_main,
            process_index=self.world.rank,
            num_processes=self.world.size,
            mixed_precision=self.precision.name,
            torch_device_mesh=self.sharding.mesh,
            parallelism_config=self.sharding.parallelism,
            wait_for_everyone=lambda: barrier(self.world),
        )

    # 2
    def exchanges(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def held_back(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay whole on this rank inside, which costs their memory."""
        return self._syncing(model, False)

    def synchronised(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._syncing(model, True)

    @contextmanager
    def _syncing(self, model: Any, sync: bool) -> Iterator[None]:
        before = self._held.get(model, 0)
        self._held[model] = 0 if sync else before + 1
        model.set_requires_gradient_sync(sync)
        try:
            yield
        finally:
            self._held[model] = before
            model.set_requires_gradient_sync(not before)

    def own_gradients(self, model: nn.Module) -> Own:
        apart = [p.grad for p in self._apart.get(model, ())]
        try:
            return [*apart, *(place.own_part() for place in gradients.held_in_units(model))]
        except UnsupportedError:
            # nobody can see what is held: another tensor each time says that a backward which synchronised has exchanged it
            return [torch.empty(0)]

    def synchronises_now(self, model: nn.Module) -> bool:
        return not self._held.get(model, 0)

    def exchange_model(self, model: nn.Module) -> None:
        _reshard(model)  # what is gathered a step would not change
        gradients.exchange(self._sharers, gradients.held_in_units(model))
        self._average_apart([model])

    # 3
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate; torch averages and shards the gradients on the way, those of ignored modules are averaged afterwards.

        Then buffers follow rank 0's.
        """
        super().backward(loss, divisor=divisor, **kwargs)
        if self.world.size == 1:
            return
        self._average_apart(model for model in list(self._apart) if self.synchronises_now(model))
        self._buffers.share(held=lambda model: self._held.get(model, 0))

    def _average_apart(self, models: Iterable[nn.Module]) -> None:
        due = [p for model in models for p in self._apart.get(model, ()) if p.requires_grad]
        if due:
            sum_partial_gradients(due)
            average_gradients(self._sharers, due)

    # 4
    def drop_held(self, optimizer: Optimizer) -> None:
        open_models = self._windows.open_models()
        if open_models:
            emptied = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for place in (place for model in open_models for place in gradients.held_in_units(model)):
                if id(place.parameters[0]) in emptied:
                    place.give(None)

    def note_held(self, model: nn.Module, held: bool) -> None:
        super().note_held(model, held)
        own = self.window_of(model)
        if own is not None and held:
            _gather_once(own)

    # 6
    def gradient_places(self, model: nn.Module) -> gradients.Places:
        """Shards, and what is held back whole in a window."""
        own = self.window_of(model)
        if own is None:
            return super().gradient_places(model)
        _reshard(own)  # what is gathered shows other parameters
        return {**super().gradient_places(model), **gradients.held_by_fsdp2(own)}

    def held_gradients(self) -> Iterable[gradients.GradientPlace]:
        for model in list(self._held):
            _reshard(model)
        return [place for model in list(self._held) for place in gradients.held_by_fsdp2(model).values()]

    def gradient_layout(self, model: nn.Module) -> str:  # noqa: ARG002
        return f"{self.name} over {mesh_text(self.sharding.mesh or self.sharding.shards)}"

    # 8
    def close(self) -> None:
        """Let go of everything that was prepared."""
        super().close()
        for known in (self._became, self._optimizers, self._apart, self._held, self._buffers):
            known.clear()


def _reshard(model: nn.Module) -> None:
    """Undo what a forward without a backward has left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _gather_once(model: nn.Module) -> None:
    """Where a gradient is held back, torch's backward asks for the gathered parameter, also where this process has not run the unit."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            part.reshard()
