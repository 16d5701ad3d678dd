"""What the Accelerator's constructor decides: every option checked, the world joined, precision and strategy chosen."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acc_ops.devices import device_row, is_present
from acc_ops.enums import DynamoBackend, RNGType
from acc_ops.environment import get_int_from_env
from acc_ops.handlers import KwargsHandler
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from acc_plugins.options.kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from acc_plugins.options.project import ProjectConfiguration
from acc_plugins.strategies.registry import choose_precision, choose_strategy
from acc_plugins.strategies.strategy import Strategy
from acc_trainer.engines import check_plugins as check_plugins
from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import sync_from_plugin
from acc_trainer.state import AcceleratorState, is_initialized

_HANDLERS: dict[type[KwargsHandler], str] = {
    AutocastKwargs: "autocast",
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "init",
    ProfileKwargs: "profile",
    AORecipeKwargs: "fp8",
    TERecipeKwargs: "fp8",
    MSAMPRecipeKwargs: "fp8",
}


@dataclass(kw_only=True)
class Handlers:
    """The keyword handlers of a run, by what they are for."""

    autocast: AutocastKwargs | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: KwargsHandler | None = None


def sort_handlers(handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Each handler to its place.

    Raises `TypeError` for what is no handler, `ValueError` for two of a kind and for a kind that nothing uses yet.
    """
    made = Handlers()
    if isinstance(handlers, KwargsHandler):
        raise TypeError(
            f"kwargs_handlers takes a list, got one handler: write kwargs_handlers=[{handlers!r}]"
        )
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise TypeError(f"kwargs_handlers takes KwargsHandler objects, got {handler!r}")
        place = next((name for kind, name in _HANDLERS.items() if isinstance(handler, kind)), None)
        if place is None:
            raise ValueError(
                f"{type(handler).__name__} has no effect yet in acc: leave it out of kwargs_handlers"
            )
        if getattr(made, place) is not None:
            raise ValueError(f"only one {type(handler).__name__} can be given in kwargs_handlers")
        setattr(made, place, handler)
    return made


def count_of_steps(steps: int, plugin: GradientAccumulationPlugin | None) -> GradSync:
    """The accumulation counter. ACCELERATE_GRADIENT_ACCUMULATION_STEPS beats the argument.

    Raises `ValueError` for a number of steps together with a plugin, and for one below 1.
    """
    if plugin is not None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            raise TypeError(
                f"gradient_accumulation_plugin must be a GradientAccumulationPlugin, got {plugin!r}"
            )
        if steps != 1:
            raise ValueError(
                f"give either gradient_accumulation_steps (here {steps}) or a gradient_accumulation_plugin, not both"
            )
        return sync_from_plugin(plugin)
    GradSync(steps)  # a bad argument is an error also where the environment decides
    steps = get_int_from_env(["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], steps)
    return sync_from_plugin(GradientAccumulationPlugin(num_steps=steps))


def project_of(project_dir: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """The folders of the run; `project_dir` fills in what `config` leaves open."""
    if config is not None and not isinstance(config, ProjectConfiguration):
        raise TypeError(f"project_config must be a ProjectConfiguration, got {config!r}")
    made = config if config is not None else ProjectConfiguration()
    if project_dir is not None and made.project_dir is None:
        made.set_directories(os.fspath(project_dir))
    return made


def dataloader_of(
    config: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """How loaders are prepared, in a copy of the Accelerator's own; its `split_batches` counts where it was given."""
    if config is not None and not isinstance(config, DataLoaderConfiguration):
        raise TypeError(f"dataloader_config must be a DataLoaderConfiguration, got {config!r}")
    made = copy.copy(config) if config is not None else DataLoaderConfiguration()
    if split_batches is not None:
        made.split_batches = bool(split_batches)
    return made


def dynamo_of(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How models are compiled. Raises `ValueError` when both ways to say it are used."""
    if backend is not None and plugin is not None:
        raise ValueError("give either dynamo_backend or dynamo_plugin, not both")
    if plugin is not None:
        if not isinstance(plugin, TorchDynamoPlugin):
            raise TypeError(f"dynamo_plugin must be a TorchDynamoPlugin, got {plugin!r}")
        return plugin
    return TorchDynamoPlugin(backend=DynamoBackend(str(backend).upper()) if backend is not None else None)


def rng_types_of(rng_types: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    """The random generators that a loader synchronises; only the loader's own unless given.

    Raises `TypeError` for what is no list, `ValueError` for an unknown generator and for one of a device that this machine has not got:
    on one rank too, where nothing is synchronised.
    """
    if rng_types is None:
        return ["generator"]
    if isinstance(rng_types, (str, RNGType)) or not isinstance(rng_types, Iterable):
        raise TypeError(
            f'rng_types takes a list of generators, such as ["torch", "generator"], got {rng_types!r}'
        )
    made = list(rng_types)
    for one in made:
        name = str(getattr(one, "value", one))
        if name not in RNGType.list():
            raise ValueError(f"rng_types knows {', '.join(RNGType.list())}, got {one!r}")
        if name not in ("torch", "generator") and not is_present(device_row(name)):
            raise ValueError(
                f"rng_types asks for the generator of {name!r}, but this machine has no such device: leave it out"
            )
    return made


def as_list(value: Any) -> list[Any]:
    """None, one thing, or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def join_run(
    *,
    mixed_precision: Any,
    cpu: bool,
    dynamo: TorchDynamoPlugin,
    handlers: Handlers,
    save_on_each_node: bool,
    plugins: Mapping[str, Any],
) -> tuple[AcceleratorState, Strategy]:
    """Join the world and choose precision and strategy; called when every option was checked, so a bad one joins nothing.

    `plugins` are the arguments of the Accelerator that ask for an engine, by name.
    """
    init = handlers.init.to_kwargs() if handlers.init is not None else {}
    first = not is_initialized()
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        dynamo_plugin=dynamo,
        _from_accelerator=True,
        **plugins,
        **init,
    )
    try:
        precision = choose_precision(
            state.mixed_precision,
            state.world.device,
            scaler_options=handlers.scaler,
            autocast_options=handlers.autocast,
            fp8_recipe=handlers.fp8,
            gathers_in_fp8=state.is_fsdp2,
        )
        strategy = choose_strategy(
            state.world,
            precision,
            ddp_options=handlers.ddp,
            fsdp=state.engines.fsdp,
            parallelism=state.engines.parallelism,
            save_on_each_node=save_on_each_node,
        )
    except BaseException:
        if first:  # the next Accelerator must be free to choose something that works
            AcceleratorState._reset_state()
        raise
    return state, strategy
