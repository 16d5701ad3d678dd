"""prepare: loaders on their own; models, optimizers and schedulers together, because a strategy may have to replace them together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from acc_ops.enums import DynamoBackend
from acc_ops.environment import parse_flag_from_env
from acc_ops.regions import compile_regions, compile_regions_fsdp2, has_compiled_regions, is_compiled_module
from acc_ops.unwrap import extract_model_from_parallel
from acc_plugins.strategies.clip import local_part
from acc_plugins.strategies.placing import place
from acc_plugins.strategies.strategy import Bundle
from acc_trainer.bundle import Given, held_in, sort_given
from acc_trainer.data.prepare import is_prepared, prepare_data_loader
from acc_trainer.data.shares import shares_of
from acc_trainer.lomo import is_lomo, stepped_in_backward
from acc_trainer.optimizer import AcceleratedOptimizer
from acc_trainer.scheduler import AcceleratedScheduler, belongs_to

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator
    from acc_trainer.views import Views

logger = logging.getLogger(__name__)


def prepare(
    accelerator: Accelerator,
    objects: Sequence[Any],
    device_placement: Sequence[bool | None] | None = None,
    evaluation: bool = False,
) -> list[Any]:
    """The prepared objects, in the order given; what is none of ours comes back as it is.

    One object has one wrapper: what was prepared before comes back as it was made then. A wrapper that another Accelerator made, or this
    one before `free_memory`, belongs to this one from now on: its counter, its strategy, its checkpoints.
    """
    given = sort_given(objects, device_placement, accelerator.device_placement)
    for thing in objects:
        if held := held_in(thing):
            logger.warning(
                "what prepare was given as a %s comes back as it is: the %s holds a %s, which is not prepared; give the things themselves, as in "
                "prepare(*things)",
                type(thing).__name__,
                type(thing).__name__,
                held,
            )
    _check_scalers(accelerator, given)
    for at in given.places("dataloader"):
        given.results[at] = prepare_loader(accelerator, given.objects[at], given.placed[at])
    if not evaluation:
        _take_from_evaluation(accelerator, given)
    models = _new(given, "model", accelerator._models, accelerator.strategy.unwrap)
    optimizers = _new(given, "optimizer", accelerator._optimizers, inside)
    schedulers = _new(given, "scheduler", accelerator._schedulers, inside)
    if models or optimizers or schedulers:
        _prepare_new(accelerator, given, models, optimizers, schedulers, evaluation)
    for at, first in given.repeats.items():
        given.results[at] = given.results[first]
    for at in given.places("optimizer"):
        _bind_optimizer(accelerator, given.results[at])
    for at in given.places("scheduler"):
        _bind_scheduler(accelerator, given.results[at])
    for scheduler in accelerator._schedulers:
        _follow_optimizers(accelerator, scheduler)
    return given.results


def prepare_sharded(accelerator: Views, objects: Sequence[Any]) -> tuple[Any, ...]:
    """`prepare` for those who count on FSDP2."""
    if not accelerator.is_fsdp2:
        raise RuntimeError(
            f"models are prepared by {type(accelerator.strategy).__name__} here, not by FSDP2: build the Accelerator with "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    return tuple(prepare(cast("Accelerator", accelerator), objects))


def named_parameters(objects: Sequence[Any], drop_refs: bool) -> dict[str, Any]:
    """The parameters of the models among `objects`, by name; with `drop_refs` the address of the data that this rank has of each."""
    found: dict[str, Any] = {}
    for model in objects:
        if isinstance(model, nn.Module):
            found.update(model.named_parameters())
    return {name: local_part(p).data_ptr() for name, p in found.items()} if drop_refs else found


def _prepare_new(
    accelerator: Accelerator,
    given: Given,
    models: list[int],
    optimizers: list[int],
    schedulers: list[int],
    evaluation: bool,
) -> None:
    """What is not on this Accelerator's shelves yet, through its strategy, and onto them."""
    _check_device_maps(accelerator, [given.objects[at] for at in models])
    bundle = Bundle(
        models=[given.objects[at] for at in models],
        optimizers=[inside(given.objects[at]) for at in optimizers],
        schedulers=[inside(given.objects[at]) for at in schedulers],
        place=_place_each(accelerator, given, models),
        evaluation=evaluation,
    )
    made = accelerator.strategy.prepare(bundle)
    for at, model in zip(models, made.models, strict=True):
        given.results[at] = _keep(accelerator._models, _compiled(accelerator, model))
        if evaluation:
            accelerator._only_evaluated.add(given.results[at])
    for at, optimizer in zip(optimizers, made.optimizers, strict=True):
        given.results[at] = _keep(
            accelerator._optimizers, _optimizer(given.objects[at], optimizer, given.placed[at])
        )
    for at, scheduler in zip(schedulers, made.schedulers, strict=True):
        given.results[at] = _keep(
            accelerator._schedulers, _scheduler(accelerator, given.objects[at], scheduler)
        )


def prepare_loader(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    placed: bool,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> Any:
    """This rank's loader; a prepared one comes back as it is, and one that was prepared with the same options as it was made then."""
    made: Any = loader
    if not is_prepared(loader):
        chosen = (accelerator.device, placed, slice_fn_for_dispatch, tuple(accelerator.rng_types))
        options = (*chosen, replace(accelerator.dataloader_config))
        made = next((one for one in accelerator._dataloaders if one._made_from(loader, options)), None)
        if made is None:
            made = _made_loader(accelerator, loader, placed, slice_fn_for_dispatch)
            made._origin = weakref.ref(loader), options
    made._grad_sync = accelerator.grad_sync
    if all(known is not made for known in accelerator._dataloaders):
        accelerator._dataloaders.append(made)
    return made


def _made_loader(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    placed: bool,
    slice_fn_for_dispatch: Callable[..., Any] | None,
) -> Any:
    options = accelerator.dataloader_config
    return prepare_data_loader(
        loader,
        device=accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=options.split_batches,
        put_on_device=placed,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=options.dispatch_batches,
        even_batches=options.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=options.use_seedable_sampler,
        data_seed=options.data_seed,
        non_blocking=options.non_blocking,
        use_stateful_dataloader=options.use_stateful_dataloader,
        torch_device_mesh=accelerator.torch_device_mesh,
    )


def _take_from_evaluation(accelerator: Accelerator, given: Given) -> None:
    """A model that was prepared for evaluation alone, and is now wanted for training, is made ready anew: it was not wrapped for that."""
    asked = [given.objects[at] for at in given.places("model")]
    for model in [one for one in accelerator._models if one in accelerator._only_evaluated]:
        if any(thing is model or accelerator.strategy.unwrap(model) is thing for thing in asked):
            accelerator._models[:] = [one for one in accelerator._models if one is not model]
            accelerator._only_evaluated.discard(model)


def _new(given: Given, kind: str, shelf: Sequence[Any], own: Callable[[Any], Any]) -> list[int]:
    """Where objects stand that are to be made ready; one that is on the shelf is its own result, a second mention waits for the first."""
    firsts: dict[int, int] = {}
    for at in given.places(kind):
        thing = inside(given.objects[at])
        known = next((one for one in shelf if one is thing or own(one) is thing), None)
        if known is not None:
            given.results[at] = known
        elif id(thing) in firsts:
            given.repeats[at] = firsts[id(thing)]
        else:
            firsts[id(thing)] = at
    return list(firsts.values())


def inside(thing: Any) -> Any:
    """The user's own optimizer or scheduler in a wrapper of ours; anything else is itself."""
    if isinstance(thing, AcceleratedOptimizer):
        return thing.optimizer
    return thing.scheduler if isinstance(thing, AcceleratedScheduler) else thing


def _check_scalers(accelerator: Accelerator, given: Given) -> None:
    """A scaler that was given to a wrapper by hand must not be left out in silence."""
    for at in given.places("optimizer"):
        thing = given.objects[at]
        by_hand = isinstance(thing, AcceleratedOptimizer) and thing.scaler is not None
        if by_hand and accelerator.precision.scaler is None:
            raise ValueError(
                f"{type(inside(thing)).__name__} was wrapped with a gradient scaler, which an Accelerator with "
                f"mixed_precision={accelerator.mixed_precision!r} does not use: give prepare the optimizer itself, or build the "
                "Accelerator with mixed_precision='fp16'"
            )


def _check_device_maps(accelerator: Accelerator, models: list[nn.Module]) -> None:
    """A model that is spread over several devices cannot be copied to every process."""
    if not accelerator.use_distributed or parse_flag_from_env("ACCELERATE_BYPASS_DEVICE_MAP"):
        return
    for model in models:
        if has_device_map(model):
            raise ValueError(
                f"{type(model).__name__} is spread over several devices by a device map, which cannot be combined with "
                f"{accelerator.num_processes} processes: load it without device_map, or start one process"
            )


def has_device_map(model: nn.Module) -> bool:
    """Whether some module of `model` was dispatched over more than one place."""
    return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())


def unwrapped(accelerator: Accelerator, model: Any, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> Any:
    """The user's own module, with its original forward unless `keep_fp32_wrapper`."""
    inner = extract_model_from_parallel(model, True, keep_torch_compile)
    if keep_fp32_wrapper:
        return inner
    return extract_model_from_parallel(accelerator.precision.unwrap(inner), False, keep_torch_compile)


def _place_each(accelerator: Accelerator, given: Given, models: list[int]) -> bool:
    """Whether the strategy shall move the models; when only some shall move, they are moved here."""
    wanted = {given.placed[at] for at in models}
    if wanted != {True, False}:
        return wanted != {False}
    for at in models:
        if given.placed[at]:
            place(given.objects[at], accelerator.device)
    return False


def _keep(shelf: list[Any], thing: Any) -> Any:
    shelf.append(thing)
    return thing


def _compiled(accelerator: Accelerator, model: nn.Module) -> Any:
    plugin = accelerator.dynamo_plugin
    if plugin.backend is DynamoBackend.NO or is_compiled_module(model) or has_compiled_regions(model):
        return model
    if accelerator.strategy.why_not_compiled:
        logger.warning("%s is not compiled: %s", type(model).__name__, accelerator.strategy.why_not_compiled)
        return model
    arguments = plugin.to_kwargs()
    if plugin.use_regional_compilation:
        in_place = accelerator.strategy.changes_modules_in_place
        return (compile_regions_fsdp2 if in_place else compile_regions)(model, **arguments)
    return torch.compile(model, **arguments)


def _optimizer(given: Any, optimizer: Optimizer, placed: bool) -> AcceleratedOptimizer:
    """The wrapper that was given, or a new one, around what the strategy made of the optimizer in it."""
    if not isinstance(given, AcceleratedOptimizer):
        return AcceleratedOptimizer(optimizer, device_placement=placed)
    given.optimizer = optimizer
    return given


def _bind_optimizer(accelerator: Accelerator, made: AcceleratedOptimizer) -> None:
    """Let this Accelerator decide when and how the optimizer steps."""
    made.scaler = accelerator.precision.scaler
    made._bind(accelerator.grad_sync, stepped_in_backward if is_lomo(made) else accelerator.strategy.step)


def _scheduler(accelerator: Accelerator, given: Any, scheduler: Any) -> AcceleratedScheduler:
    """The wrapper that was given, or a new one, around what the strategy made of the scheduler in it."""
    if not isinstance(given, AcceleratedScheduler):
        return AcceleratedScheduler(
            scheduler,
            [],
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches,
        )
    given.scheduler = scheduler
    return given


def _bind_scheduler(accelerator: Accelerator, made: AcceleratedScheduler) -> None:
    """Let the schedule follow this Accelerator's counter."""
    if made._grad_sync is not None:  # one built by hand keeps what it was told
        made.step_with_optimizer = accelerator.step_scheduler_with_optimizer
        made.split_batches = accelerator.split_batches
    made._bind(
        accelerator.grad_sync, shares_of(accelerator.torch_device_mesh, 0, accelerator.num_processes).count
    )


def _follow_optimizers(accelerator: Accelerator, made: AcceleratedScheduler) -> None:
    """The optimizer that the schedule was built on, which may be prepared after it; else those it has, else all."""
    matching = [one for one in accelerator._optimizers if belongs_to(made, one)]
    made.optimizers = matching or made.optimizers or list(accelerator._optimizers)
