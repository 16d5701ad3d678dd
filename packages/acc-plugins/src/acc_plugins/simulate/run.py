"""One training step without memory and without other processes: built as it would really be, run on tensors that only pretend, and counted."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from acc_ops.world import World
from acc_plugins.options.fsdp import FullyShardedDataParallelPlugin
from acc_plugins.options.parallelism import ParallelismConfig
from acc_plugins.simulate.fake_world import fake_world
from acc_plugins.simulate.memory import LiveBytes, SavedForBackward, bytes_of, tensors_in
from acc_plugins.simulate.plan import Plan, make_plan
from acc_plugins.simulate.report import Simulation
from acc_plugins.simulate.skeleton import give_memory, meta_copy
from acc_plugins.simulate.traffic import TrafficCounter

logger = logging.getLogger(__name__)
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# newer than torch 2.6, which raises a RuntimeError of no name
_OTHER_DEVICE: Any = getattr(fake_tensor, "FakeTensorDeviceMismatchError", ())
Recompute = Literal["none", "blocks", "full"]


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    batch: Mapping[str, Any] | tuple[Any, ...] | Tensor,
    *,
    world_size: int,
    parallelism: ParallelismConfig | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    mixed_precision: Literal["no", "bf16", "fp16"] = "no",
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = torch.optim.AdamW,
    loss: Callable[[Any], Tensor] | None = None,
    recompute: Recompute = "none",
) -> Simulation:
    """What one training step of `model` costs one rank of `world_size`: bytes kept, bytes at the peak, bytes sent, by axis.

    `model` is a module, whose values are not read, or a function that makes one (on the meta device). `batch` is one rank's micro-batch, as the
    model takes it: keyword arguments, positional ones, or one tensor; only shapes and formats count, so meta tensors do. Without `parallelism` all
    ranks hold replicas, or with `fsdp_plugin` (of version 2) shards. `optimizer` makes one from parameters. `loss` turns the output into a
    number; by default it is the output itself, its `loss`, or the sum of its floating-point tensors. `recompute` says which activations are
    computed again in backward: none, those inside each block (as FSDP's plugin chooses blocks), or all.

    Nothing is sent, no memory is taken, nothing is changed. Raises RuntimeError in a process that has a process group; ValueError for sizes that do not
    make `world_size`, options that do not fit each other, and a model whose path depends on values; UnsupportedError (a ValueError) for
    shards where this torch cannot pretend to gather them (2.6).
    """
    plan = make_plan(world_size, parallelism, fsdp_plugin, mixed_precision, recompute)
    skeleton = meta_copy(model)
    with fake_world(world_size) as world:
        activations = _activations(skeleton, batch, plan, world, loss)
        return _step(skeleton, batch, plan, world, optimizer, loss, activations)


def _activations(skeleton: nn.Module, batch: Any, plan: Plan, world: World, loss: Any) -> int:
    """Bytes that autograd keeps of one forward. Sharding changes nothing of it, so the model is whole here: its gathered weights are no activations."""
    model, batch = plan.cast(copy.deepcopy(skeleton), batch)
    model = plan.split(model, world)
    plan.checkpoint(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_memory(model)
        model.train()
        given = _pretended(batch)
        with plan.around(model, given), SavedForBackward(model, given) as saved:
            kept = _forward(model, given, loss)
        size = saved.nbytes()
        del kept
    return size


def _step(
    skeleton: nn.Module,
    batch: Any,
    plan: Plan,
    world: World,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    loss: Any,
    activations: int,
) -> Simulation:
    model = plan.wrap(copy.deepcopy(skeleton), world)
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_memory(model)
        model.train()
        given = _pretended(batch)
        optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
        live = LiveBytes([*model.parameters(), *model.buffers(), *tensors_in(given)])
        counter = TrafficCounter(plan.axes_of_groups())
        with live, counter:
            with plan.around(model, given):
                _forward(model, given, loss).backward()
            plan.exchange(model, counter)
            gradients = bytes_of(p.grad for p in model.parameters())
            _take_step(optimizer)
        state = (value for values in optimizer.state.values() for value in tensors_in(values))
        return Simulation(
            world_size=world.size,
            axes=plan.axes,
            parameters=sum(p.numel() for p in skeleton.parameters()),
            weights=bytes_of(model.parameters()),
            buffers=bytes_of(model.buffers()),
            gradients=gradients,
            buckets=gradients if plan.is_ddp else 0,
            optimizer=bytes_of(state),
            activations=activations,
            peak=live.peak + (gradients if plan.is_ddp else 0),
            recompute=plan.recompute,
            traffic=counter.traffic(),
        )


def _take_step(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    asks = inspect.signature(type(optimizer).step).parameters.get("closure")
    if asks is not None and asks.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} computes the loss again as often as its values ask for, and a simulation has none: give optimizer= one whose step needs no closure"
        )
    try:
        optimizer.step()
    except _VALUES as error:
        raise ValueError(
            f"the step of {name} depends on values ({error.func}), and a simulation has none: give optimizer= one that does not look at them "
            "(AdamW, SGD)"
        ) from error


def _forward(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    try:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple) else model(batch)
        value = _loss_of(output) if loss is None else loss(output)
    except _VALUES as error:
        raise ValueError(
            f"the path of {type(model).__name__} depends on values ({error.func}), and a simulation has none: leave out of the batch what it "
            "looks at (an attention mask, for instance), or simulate the part that does the work"
        ) from error
    except _OTHER_DEVICE as error:
        raise ValueError(
            f"{type(model).__name__} computes with a tensor that is neither a parameter nor a buffer, so that it was not copied with them ({error}): "
            "keep it by register_buffer(name, tensor, persistent=False)"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"the loss must be one number that can be differentiated, got {value!r:.200}: give loss="
        )
    return value


def _loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output if output.numel() == 1 else output.sum()
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    floats = [t.sum() for t in tensors_in(output) if t.is_floating_point()]
    if not floats:
        raise ValueError(
            f"the model returned no floating-point tensor but {type(output).__name__}: give loss="
        )
    return torch.stack([t.float() for t in floats]).sum()


def _pretended(batch: Any) -> Any:
    """The batch as tensors of the mode that is on, without values."""
    return tree_map_only(
        Tensor, lambda t: torch.empty_like(t.detach(), device="cpu").requires_grad_(t.requires_grad), batch
    )
