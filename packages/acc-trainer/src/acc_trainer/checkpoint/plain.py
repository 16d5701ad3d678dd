"""The specification's files for objects that no Accelerator holds: `save_accelerator_state` and `load_accelerator_state`.

No transaction, no manifest: they are for scripts that call them by themselves. `save_state` and `load_state` are not built on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from acc_ops.world import World, current_world
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Strategy

from . import layout
from .generators import restore_generators, states_to_save
from .layout import CheckpointError
from .read import map_location_of
from .samplers import give_sampler, sampler_state
from .torch_files import read_file, read_random


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states, one file each, into `output_dir`, which is made where it is missing; the folder.

    Rank 0 (with `save_on_each_node` the first rank of every machine) writes what all have in common, and every rank its random generators.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    world = current_world()
    strategy = _plain(world, save_on_each_node)
    for index, state in enumerate(model_states):
        strategy.save_model(
            torch.nn.Module(), state, folder, layout.numbered("model", index), safe_serialization
        )
    for index, optimizer in enumerate(optimizers):
        strategy.save_optimizer(optimizer, folder, layout.numbered("optimizer", index))
    states = {layout.scheduler_file(i): one.state_dict() for i, one in enumerate(schedulers)}
    for index, loader in enumerate(dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            states[layout.loader_file(index)] = loader.state_dict()
        if (order := sampler_state(loader)) is not None:
            states[layout.sampler_file(index)] = order
    if scaler is not None:
        states[layout.SCALER] = scaler.state_dict()
    for file, state in states.items():
        if strategy.writes:
            torch.save(state, folder / file)
    torch.save(states_to_save(step), folder / layout.random_file(process_index))
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Give every object what `save_accelerator_state` (or `save_state`) wrote of it; `{"step": n}`, or `{}` where no step was written.

    Everything is looked for before anything is touched. `map_location` is None, "cpu" or "on_device", `load_kwargs` go to torch.load, `strict`
    to the models. Random generators that cannot be restored are told in a warning. TypeError for other arguments; FileNotFoundError and
    CheckpointError, which names the file, for one that is missing or cannot be read.
    """
    device = map_location_of(current_world(), map_location)
    strict = load_model_func_kwargs.pop("strict", True)
    if load_model_func_kwargs:
        raise TypeError(
            f"load_accelerator_state does not know {', '.join(load_model_func_kwargs)}; known: strict"
        )
    folder, strategy = Path(input_dir), _plain(current_world())
    options = dict(load_kwargs or {})
    loads = [
        *(
            strategy.open_model(model, folder, layout.numbered("model", index), device, strict)
            for index, model in enumerate(models)
        ),
        *(
            strategy.open_optimizer(optimizer, folder, layout.numbered("optimizer", index), device)
            for index, optimizer in enumerate(optimizers)
        ),
    ]
    give = _small_ones(folder, schedulers, dataloaders, scaler, options)
    random = folder / layout.random_file(process_index)
    saved = read_random(random) if random.is_file() else {}
    for load in loads:
        load()
    for take, state in give:
        take(state)
    if saved:
        restore_generators(saved)
    return {"step": int(saved["step"])} if "step" in saved else {}


def _small_ones(
    folder: Path,
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: Any,
    options: Mapping[str, Any],
) -> list[tuple[Callable[[Any], Any], Any]]:
    """Who takes which state; all of them are read."""
    give: list[tuple[Callable[[Any], Any], Any]] = [
        (one.load_state_dict, read_file(folder / layout.scheduler_file(index), options))
        for index, one in enumerate(schedulers)
    ]
    for index, loader in enumerate(dataloaders):
        state, order = folder / layout.loader_file(index), folder / layout.sampler_file(index)
        if getattr(loader, "use_stateful_dataloader", False) and state.is_file():
            give.append((loader.load_state_dict, read_file(state, options)))
        if sampler_state(loader) is not None and order.is_file():
            give.append((_giving(loader), read_file(order, options)))
    if scaler is not None:
        if not (folder / layout.SCALER).is_file():
            raise CheckpointError(f"the checkpoint {folder} is not whole: {layout.SCALER} is missing")
        give.append((scaler.load_state_dict, read_file(folder / layout.SCALER, options)))
    return give


def _giving(loader: Any) -> Callable[[Any], None]:
    return lambda state: give_sampler(loader, state)


def _plain(world: World, save_on_each_node: bool = False) -> Strategy:
    """What reads and writes whole states, whoever trained them."""
    return Strategy(world, Precision(), save_on_each_node=save_on_each_node)
