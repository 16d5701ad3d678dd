"""torch's FSDP, version 1: each wrapped block is one flat parameter of which every rank keeps a part.

[Note: who has which parameter] torch flattens the parameters of a block into one `FlatParameter`. With `use_orig_params=True` the model still shows
the original parameters, as views of this rank's part (empty where it has none of them), and optimizers keep them. With False it shows the flat
one only, and an optimizer gets it in the place of the originals (`flat_optimizers.py`).

[Note: where values come from] Every rank trains rank 0's weights, as with all strategies: they are sent before the model is wrapped, one tensor
at a time. A rank whose model is on the meta device gets memory first. On an accelerator with `sync_module_states` torch does both, block by
block, so that no rank ever holds the whole model; on a CPU torch refuses that.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy
from torch.optim import Optimizer

from acc_hooks.ties import shared_parameters, tie_again
from acc_ops.exchange import together
from acc_ops.world import World
from acc_plugins.options import fsdp_values
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies import flat_gradients, gradients
from acc_plugins.strategies.agreement import Facts, check_agreement
from acc_plugins.strategies.buffers import SharedBuffers
from acc_plugins.strategies.checkpointing import checkpoint_block
from acc_plugins.strategies.clip import clip_parts, unique_parameters
from acc_plugins.strategies.flat_optimizers import ParameterPlaces
from acc_plugins.strategies.fsdp1_flattening import checked_flat_parameters, ignored_parameters
from acc_plugins.strategies.fsdp2_wrapping import as_torch_asks, chosen_blocks
from acc_plugins.strategies.fsdp_plugin import (
    check_made_for,
    ignored_modules,
    say_what_is_not_ignored,
    told_ignored,
    told_options,
)
from acc_plugins.strategies.held import Own, SynchronisingStrategy
from acc_plugins.strategies.optimizer_kinds import check_for_pieces
from acc_plugins.strategies.placing import follow, place
from acc_plugins.strategies.replicated import average_gradients
from acc_plugins.strategies.same_start import send_from_rank_0
from acc_plugins.strategies.sharded import ShardedStrategy
from acc_plugins.strategies.strategy import Bundle
from acc_plugins.support import UnsupportedError

logger = logging.getLogger(__name__)
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_LOW = (torch.float16, torch.bfloat16)


class FSDP1Strategy(SynchronisingStrategy, ShardedStrategy):
    """FullyShardedDataParallel over the world's process group. Models of an evaluation bundle are not wrapped."""

    name: ClassVar[str] = "fsdp1"
    changes_modules_in_place: ClassVar[bool] = True
    can_train_apart: ClassVar[bool] = False

    def __init__(
        self,
        world: World,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        *,
        save_on_each_node: bool = False,
    ) -> None:
        """Raises ValueError for a plugin of version 2 and a world without torch.distributed, UnsupportedError for what a CPU cannot do."""
        super().__init__(world, precision, save_on_each_node=save_on_each_node)
        self._group = check_made_for(plugin, 1, world).group
        if world.device.type == "cpu" and plugin.cpu_offload.offload_params:
            raise UnsupportedError(
                "cpu_offload does not work with FSDP version 1 on a CPU (torch asks for an accelerator), where the shards are in CPU memory "
                "already: leave cpu_offload (FSDP_OFFLOAD_PARAMS) out"
            )
        if plugin.state_dict_type.name == "LOCAL_STATE_DICT":
            raise UnsupportedError(
                "state_dict_type=LOCAL_STATE_DICT writes parts that fit only the same ranks, and torch does not load them: use SHARDED_STATE_DICT, "
                "for which every rank writes its shards, too, and any number of ranks reads them"
            )
        self.plugin = plugin
        self.state_dict_type = plugin.state_dict_type.name
        if not plugin.use_orig_params:
            self.why_not_compiled = (
                "torch.compile does not look into FSDP version 1 with use_orig_params=False: say True"
            )
        self._mesh = self._nodes_mesh() if plugin.sharding_strategy in _HYBRID else None
        # parameter -> the group over which its gradient is sharded; None: every rank has all of it
        self._shared_by: Any = torch.utils.weak.WeakIdKeyDictionary()
        self._ignored: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
        self._buffers = SharedBuffers(world)
        precision.agree_over(world)

    def _nodes_mesh(self) -> Any:
        """Shards within a node, copies between nodes."""
        world = self.world
        check_agreement(world.comm, self.options_of_all_ranks())
        sizes = world.comm.all_gather_object(world.local_size)
        if len(set(sizes)) > 1 or world.size % sizes[0]:
            raise ValueError(
                f"HYBRID_SHARD needs the same number of ranks on every node, got nodes of {sorted(set(sizes))} among {world.size} ranks: start "
                "as many everywhere, or use FULL_SHARD"
            )
        shape = (world.size // sizes[0], sizes[0])
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))

    # 1
    def options_of_all_ranks(self) -> dict[str, str]:
        return {**super().options_of_all_ranks(), **told_options(self.plugin)}

    def treatment(self, model: nn.Module) -> Facts:
        ignored = frozenset(map(id, ignored_parameters(model, self.plugin)))
        blocks = {id(block) for block in chosen_blocks(model, self.plugin, ignored)}
        wrapped = [(name, "wrapped") for name, module in model.named_modules() if id(module) in blocks]
        return [*told_ignored(model, self.plugin), *wrapped]

    def shard(self, bundle: Bundle) -> Bundle:
        """Each model wrapped; optimizers with the parameters that are trained now.

        Raises ValueError on every rank, before anything is changed, for ranks that built different models, what does not fit into flat parameters,
        and optimizers that cannot follow; and for weights without values.
        """
        check_for_pieces(bundle.optimizers)
        if not bundle.evaluation:
            self._check(bundle)
        before = [p for model in bundle.models for p in model.parameters()]
        models = [self._placed(model, bundle) for model in bundle.models]
        follow(bundle.optimizers, before, [p for model in models for p in model.parameters()])
        places = ParameterPlaces(models)
        if not bundle.evaluation:
            fresh = [not isinstance(model, FullyShardedDataParallel) for model in models]
            models = [self._wrap(model) if new else model for model, new in zip(models, fresh, strict=True)]
            units = [_units(model) for model in models]
            self._note_groups(unit for found in units for unit in found)
            moved = [unit for found, new in zip(units, fresh, strict=True) if new for unit in found]
            places.move(bundle.optimizers, moved, self.world.comm)
        return replace(
            bundle, models=models, optimizers=list(bundle.optimizers), schedulers=list(bundle.schedulers)
        )

    def _check(self, bundle: Bundle) -> None:
        flat: list[list[Tensor]] = []
        for model in bundle.models:
            if not isinstance(model, FullyShardedDataParallel):
                low = _low_weights(model).values() if self.precision.name != "no" else ()
                flat += [[p for _, p in one] for one in checked_flat_parameters(model, self.plugin, low)]
        merged = not self.plugin.use_orig_params
        ParameterPlaces(bundle.models).check(bundle.optimizers, flat, merged, self.world.comm)

    def _placed(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        """`model` with rank 0's values, on the device and in the run's precision; not wrapped yet."""
        if isinstance(model, FullyShardedDataParallel):
            self.precision.wrap(model.module)
            return model
        if not bundle.evaluation and not self._torch_sends_weights:
            self._take_values(model)
        if bundle.place and not any(p.is_meta for p in model.parameters()):
            model = place(model, self.world.device)
        model = self.precision.wrap(model)
        if self.precision.name != "no":
            _keep_master_weights(model)
        return model

    @property
    def _torch_sends_weights(self) -> bool:
        return bool(self.plugin.sync_module_states) and self.world.device.type != "cpu"

    def _take_values(self, model: nn.Module) -> None:
        """Memory for what is on the meta device, then rank 0's values for everything."""
        empty = next((name for name, t in _all_tensors(model) if t.is_meta), None)
        first = self.world.comm.broadcast_object(empty)
        own = self.plugin.param_init_fn
        if first is not None and own in (None, fsdp_values.to_empty):
            raise ValueError(
                f"{first} of {type(model).__name__} is on the meta device on rank 0, too, so that no rank has its values: load the weights on "
                "rank 0, or give param_init_fn, which makes them"
            )
        initialise = own if first is not None and own is not None else self._to_empty
        together(
            self.world, lambda: _give_memory(model, initialise)
        )  # param_init_fn is the user's, and may raise
        send_from_rank_0([t for _, t in _all_tensors(model)], self.world)

    def _to_empty(self, module: nn.Module) -> None:
        module.to_empty(device=self.world.device, recurse=False)

    def _note_groups(self, units: Iterable[Any]) -> None:
        for unit in units:
            handle = unit._handle
            group = handle.process_group if handle.uses_sharded_strategy else None
            for p in [handle.flat_param, *(handle.flat_param._params or ())]:
                self._shared_by[p] = group

    def _wrap(self, model: nn.Module) -> nn.Module:
        plugin = copy.copy(self.plugin)  # the policy is completed for this model only
        plugin.set_auto_wrap_policy(model)
        ignored = ignored_modules(model, plugin)
        say_what_is_not_ignored(model, plugin)
        if plugin.activation_checkpointing and plugin.auto_wrap_policy is None:
            logger.warning(
                "activation_checkpointing has no effect without auto_wrap_policy: there are no blocks"
            )
        wrapped = FullyShardedDataParallel(
            model,
            process_group=None if self._mesh is not None else self._group,
            sharding_strategy=plugin.sharding_strategy,
            auto_wrap_policy=_as_torch_takes(plugin.auto_wrap_policy),
            backward_prefetch=plugin.backward_prefetch,
            mixed_precision=plugin.mixed_precision_policy,
            ignored_modules=ignored,
            param_init_fn=plugin.param_init_fn if self._torch_sends_weights else None,
            device_id=self.world.device,
            sync_module_states=self._torch_sends_weights,
            forward_prefetch=bool(plugin.forward_prefetch),
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            cpu_offload=plugin.cpu_offload if plugin.cpu_offload.offload_params else None,
            device_mesh=self._mesh,
        )
        apart = [p for module in ignored for p in module.parameters()]
        if apart:
            self._ignored[wrapped] = unique_parameters(apart)
        self._buffers.watch(wrapped)
        if plugin.activation_checkpointing:
            for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
                if unit is not wrapped:
                    checkpoint_block(unit.module)
        return wrapped

    # 2
    def exchanges(self, model: nn.Module) -> bool:
        return isinstance(model, FullyShardedDataParallel)

    def held_back(self, model: Any) -> AbstractContextManager[Any]:
        """`FullyShardedDataParallel.no_sync`: gradients stay whole on this rank, which costs their memory."""
        made: AbstractContextManager[Any] = model.no_sync()
        return made

    def synchronised(self, model: nn.Module) -> AbstractContextManager[Any]:
        return _synchronising(model)

    def own_gradients(self, model: nn.Module) -> Own:
        flat = [unit._handle.flat_param.grad for unit in _units(model)]
        return [*flat, *(p.grad for p in self._ignored.get(model, ()))]

    def synchronises_now(self, model: Any) -> bool:
        return bool(model._sync_gradients)

    def exchange_model(self, model: nn.Module) -> None:
        _reshard(model)  # what is gathered a step would not change
        places = flat_gradients.of_flat_parameters(model).values()
        flat = [place for place in places if isinstance(place, flat_gradients.OfFlatParameter)]
        gradients.exchange(self.world, flat)
        self._average_ignored([model])

    # 3
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate; torch averages and shards the gradients on the way, those of ignored modules are averaged afterwards.

        Then buffers follow rank 0's.
        """
        super().backward(loss, divisor=divisor, **kwargs)
        self._average_ignored(model for model in list(self._ignored) if self.synchronises_now(model))
        self._buffers.share(held=lambda model: not model._sync_gradients)

    def _average_ignored(self, models: Iterable[nn.Module]) -> None:
        due = [p for model in models for p in self._ignored.get(model, ()) if p.requires_grad]
        if due:
            average_gradients(self.world, due)

    # 4
    def drop_held(self, optimizer: Optimizer) -> None:
        open_models = self._windows.open_models()
        if open_models:
            emptied = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for place in (place for model in open_models for place in flat_gradients.put_aside(model)):
                place.forget(emptied)

    def clip_norm(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2.0
    ) -> Tensor:
        """As torch's `clip_grad_norm_`, over any mix of models: parts count with those of the other ranks, whole gradients once."""
        parts: dict[Any, list[Tensor]] = {
            None: []
        }  # group -> gradients; the same groups in the same order on every rank
        for p in unique_parameters(parameters):
            parts.setdefault(self._shared_by.get(p), []).extend([] if p.grad is None else [p.grad])
        return clip_parts(parts, max_norm, norm_type, self.world.device)

    # 6
    def gradient_places(self, model: nn.Module) -> gradients.Places:
        """Those of flat parameters: whole in a window, else this rank's part."""
        module = self.module_with_states(model)
        _reshard(module)  # what is gathered shows no gradients of parts
        return flat_gradients.of_flat_parameters(module)

    def held_gradients(self) -> Iterable[gradients.GradientPlace]:
        return [place for model in self._windows.open_models() for place in flat_gradients.put_aside(model)]

    def gradient_layout(self, model: nn.Module) -> str:
        """Another policy makes other flat parameters, so their sizes are in it."""
        units = _units(self.module_with_states(model))
        sizes = [unit._handle.flat_param._unpadded_unsharded_size.numel() for unit in units]
        return f"{self.name} {self.plugin.sharding_strategy.name}, flat parameters of {sizes} numbers"

    # 8
    def close(self) -> None:
        super().close()
        self._ignored.clear()
        self._buffers.clear()
        self._shared_by.clear()


def _as_torch_takes(policy: Any) -> Any:
    """A user's function of (module) as one of (module, recurse, nonwrapped_numel); torch's own policies, and None, as they are."""
    return policy if policy is None or isinstance(policy, _Policy) else as_torch_asks(policy)


def _units(model: nn.Module) -> list[Any]:
    """The FSDP modules in `model` that have parameters."""
    return [unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]


def _reshard(model: nn.Module) -> None:
    """Undo what a forward without a backward has left gathered."""
    for unit in _units(model):
        handle = unit._handle
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            handle.reshard(True)
            handle.post_reshard()
            handle._prefetched = False


@contextmanager
def _synchronising(model: nn.Module) -> Iterator[None]:
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    before = {unit: unit._sync_gradients for unit in units}
    for unit in before:
        unit._sync_gradients = True
    try:
        yield
    finally:
        for unit, flag in before.items():
            unit._sync_gradients = flag


def _keep_master_weights(model: nn.Module) -> None:
    """Weights that are trained in mixed precision are float32; all of them, since the parameters of a block have one dtype."""
    low = _low_weights(model)
    if low:
        logger.warning(
            "%s and %d others of %s become float32: mixed precision computes in fewer bits from those",
            next(iter(low)),
            len(low) - 1,
            type(model).__name__,
        )
    with torch.no_grad():
        for p in low.values():
            p.data = p.data.float()


def _low_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All in few bits by name, if one of those is trained."""
    low = {name: p for name, p in model.named_parameters() if p.dtype in _LOW}
    return low if any(p.requires_grad for p in low.values()) else {}


def _give_memory(model: nn.Module, initialise: Callable[[nn.Module], object]) -> None:
    """Let `initialise` do so for each module with something on the meta device. Ties hold."""
    ties = shared_parameters(model)
    for module in model.modules():
        if any(t.is_meta for _, t in _own_tensors(module)):
            initialise(module)
    for places in ties:
        tie_again(places)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((name, t) for name, t in held.items() if t is not None)


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
