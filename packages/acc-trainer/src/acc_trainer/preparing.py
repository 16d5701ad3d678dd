"""prepare: loaders on their own; models, optimizers and schedulers together, because a strategy may have to replace them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from acc_ops.enums import DynamoBackend
from acc_ops.environment import parse_flag_from_env
from acc_ops.regions import compile_regions
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.strategies.placing import place
from acc_plugins.strategies.strategy import Bundle
from acc_trainer.bundle import Given, sort_given
from acc_trainer.data.adapter import DataLoaderAdapter
from acc_trainer.data.prepare import prepare_data_loader
from acc_trainer.optimizer import AcceleratedOptimizer
from acc_trainer.scheduler import AcceleratedScheduler, belongs_to

if TYPE_CHECKING:
    from acc_trainer.accelerator import Accelerator


def prepare(
    accelerator: Accelerator,
    objects: Sequence[Any],
    device_placement: Sequence[bool | None] | None = None,
    evaluation: bool = False,
) -> list[Any]:
    """The prepared objects, in the order given; what was prepared before, and what is none of ours, comes back as it is."""
    given = sort_given(objects, device_placement, accelerator.device_placement)
    for at in given.places("dataloader"):
        given.results[at] = prepare_loader(accelerator, given.objects[at], given.placed[at])
    models = [at for at in given.places("model") if not _already(accelerator, given, at)]
    optimizers = [at for at in given.places("optimizer") if not _wrapped(given, at, AcceleratedOptimizer)]
    schedulers = [at for at in given.places("scheduler") if not _wrapped(given, at, AcceleratedScheduler)]
    if not models and not optimizers and not schedulers:
        return given.results
    _check_device_maps(accelerator, [given.objects[at] for at in models])
    bundle = Bundle(
        models=[given.objects[at] for at in models],
        optimizers=[given.objects[at] for at in optimizers],
        schedulers=[given.objects[at] for at in schedulers],
        place=_place_each(accelerator, given, models),
        evaluation=evaluation,
    )
    made = accelerator.strategy.prepare(bundle)
    for at, model in zip(models, made.models, strict=True):
        given.results[at] = _keep(accelerator._models, _compiled(model, accelerator.dynamo_plugin))
    for at, optimizer in zip(optimizers, made.optimizers, strict=True):
        given.results[at] = _keep(
            accelerator._optimizers, _optimizer(accelerator, optimizer, given.placed[at])
        )
    for at, scheduler in zip(schedulers, made.schedulers, strict=True):
        given.results[at] = _keep(accelerator._schedulers, _scheduler(accelerator, scheduler))
    return given.results


def prepare_loader(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    placed: bool,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> Any:
    """This rank's loader; a prepared one comes back as it is."""
    if isinstance(loader, DataLoaderAdapter):
        if all(known is not loader for known in accelerator._dataloaders):
            accelerator._dataloaders.append(loader)
        return loader
    options = accelerator.dataloader_config
    made = prepare_data_loader(
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
    made._grad_sync = accelerator.grad_sync
    accelerator._dataloaders.append(made)
    return made


def _already(accelerator: Accelerator, given: Given, at: int) -> bool:
    """Whether the model was prepared before; then it is its own result, or the wrapper that was made of it."""
    model = given.objects[at]
    for known in accelerator._models:
        if known is model or accelerator.strategy.unwrap(known) is model:
            given.results[at] = known
            return True
    return False


def _wrapped(given: Given, at: int, kind: type) -> bool:
    return isinstance(given.objects[at], kind)


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


def full_state(accelerator: Accelerator, model: nn.Module) -> Any:
    """All weights of a model, also of one that is offloaded; at least on the processes that write."""
    # a lazy start: it brings the hooks of offloaded models, which a training run does not need
    from acc_bigmodel.collect import get_state_dict_offloaded_model  # noqa: PLC0415

    own = accelerator.strategy.unwrap(model)
    if any(tensor.is_meta for tensor in own.parameters()):
        return get_state_dict_offloaded_model(own)
    return accelerator.strategy.state(model)


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


def _compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> Any:
    if plugin.backend is DynamoBackend.NO:
        return model
    arguments = plugin.to_kwargs()
    if plugin.use_regional_compilation:
        return compile_regions(model, **arguments)
    return torch.compile(model, **arguments)


def _optimizer(accelerator: Accelerator, optimizer: Optimizer, placed: bool) -> AcceleratedOptimizer:
    made = AcceleratedOptimizer(optimizer, device_placement=placed, scaler=accelerator.precision.scaler)
    made._bind(accelerator.grad_sync, accelerator.strategy.step)
    return made


def _scheduler(accelerator: Accelerator, scheduler: Any) -> AcceleratedScheduler:
    matching = [one for one in accelerator._optimizers if belongs_to(scheduler, one)]
    made = AcceleratedScheduler(
        scheduler,
        matching or list(accelerator._optimizers),
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=accelerator.split_batches,
    )
    made._bind(accelerator.grad_sync, accelerator.num_processes)
    return made
