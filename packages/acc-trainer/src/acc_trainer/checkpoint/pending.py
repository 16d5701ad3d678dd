"""What a load will hand out beside the weights: all of it is read and checked before anything of the run is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from acc_ops.callers import warn_caller

from . import layout
from .contents import Contents, Item, Run
from .generators import restore_generators
from .gradients import LOST, Gradients, check_gradients, give_gradients, scales, why_lost, window_is_open
from .layout import CheckpointError, DoesNotFitError
from .manifest import Manifest
from .progress import hand_out_progress, of_other_ranks, without_window
from .samplers import give_sampler, keeps_sampler
from .torch_files import read_file, read_random


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Everything that is small, as it was saved; None where the checkpoint says nothing and the run keeps what it has.

    `missing` and `unlike`: what a warning tells of, when all was handed out.
    """

    folder: Path
    schedulers: list[Any]
    scaler: Any | None
    custom: list[Any]
    step: int | None
    progress: Mapping[str, Any]
    gradients: Gradients | None
    samplers: list[Any]  # by loader
    loaders: list[Any]  # states of stateful loaders, where no progress says more
    random: Mapping[str, Any] | None  # empty when it could not be read
    world_size: int | None  # of the ranks that saved, where that is not the present one
    missing: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)


def check_files(contents: Contents, folder: Path) -> None:
    """Files of small things are there; for checkpoints without a manifest this is all there is to check."""
    present = len(list(folder.glob("custom_checkpoint_*.pkl")))
    if present != len(contents.custom):
        raise CheckpointError(
            f"the checkpoint {folder} holds {present} registered objects, this run has {len(contents.custom)}: "
            f"{[item.kind_of for item in contents.custom]}; register the same objects in the same order"
        )
    for item in contents.schedulers:
        if not (folder / layout.scheduler_file(item.place)).is_file():
            raise CheckpointError(
                f"the checkpoint {folder} is not whole: {layout.scheduler_file(item.place)} is missing"
            )


def open_optimizers(run: Run, contents: Contents, folder: Path, map_location: Any) -> list[Callable[[], Any]]:
    """The calls that load the optimizers, whose states are there and fit them. CheckpointError otherwise."""
    open_one = partial(run.strategy.open_optimizer, folder=str(folder), map_location=map_location)
    return [
        _opened(folder, f"the state of {item.name}", partial(open_one, item.thing, name=item.name))
        for item in contents.optimizers
    ]


def open_weights(
    run: Run, models: Sequence[tuple[Any, str]], folder: Path, map_location: Any, strict: bool
) -> list[Callable[[], Any]]:
    """The same for `models`, which come with the names of their weights."""
    options = {"folder": str(folder), "map_location": map_location, "strict": strict}
    open_one = partial(run.strategy.open_model, **options)
    return [
        _opened(folder, f"the weights of {name}", partial(open_one, model, name=name))
        for model, name in models
    ]


def _opened(folder: Path, what: str, open_it: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    try:
        return open_it()
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"{what} in {folder}: not of this run, in which nothing was changed: {error}"
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint {folder} is not whole: {error}") from error
    except (OSError, ValueError, RuntimeError, EOFError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} is not whole: {what} cannot be read ({error})"
        ) from error


def read_pending(
    run: Run, contents: Contents, folder: Path, manifest: Manifest | None, load_kwargs: Mapping[str, Any]
) -> Pending:
    """Read what this rank will hand out. CheckpointError names the file; the random state alone may be missing or unreadable."""
    missing: list[str] = []
    unlike: list[str] = []
    scaler = _scaler(run, folder, load_kwargs, missing, unlike)
    progress = _progress(run, folder, manifest, missing, unlike)
    gradients: Gradients | None = None
    if window_is_open(progress.get("grad_sync", {})):
        file = folder / layout.gradients_file(run.world.rank)
        gradients = read_file(file, {})
        _check_keys(file, gradients, Gradients.__annotations__)
        why = why_lost(run, contents, gradients, scaled=scaler is not None)
        if why is None:
            check_gradients(run, contents, gradients, file)
        else:
            gradients, progress = None, without_window(progress)
            unlike.append(f"{LOST}: {why}")
    world_size = None if manifest is None or manifest.world_size == run.world.size else manifest.world_size
    random = _random(run, folder, missing if world_size is None else [])
    step = _step(folder, progress, random or {}, run.world.rank if world_size is None else None)
    return Pending(
        folder=folder,
        schedulers=[_scheduler(item, folder, load_kwargs) for item in contents.schedulers],
        scaler=scaler if scales(run) else None,
        custom=[read_file(folder / layout.custom_file(item.place), load_kwargs) for item in contents.custom],
        step=None if step is None else int(step),
        progress=progress,
        gradients=gradients,
        samplers=[
            _read_if_there(folder / layout.sampler_file(item.place), load_kwargs, missing, "a sampler")
            if keeps_sampler(item.thing)
            else None
            for item in contents.loaders
        ],
        loaders=[_loader_of_others(item, folder, manifest, load_kwargs) for item in contents.loaders],
        random=random,
        world_size=world_size,
        missing=missing,
        unlike=unlike,
    )


def hand_out(run: Run, contents: Contents, pending: Pending) -> None:
    """Give everything to its owner; the random generators come last. One warning tells what the checkpoint has not got, one what cannot go on
    as it was."""
    folder = pending.folder
    for item, state in zip(contents.schedulers, pending.schedulers, strict=True):
        _give(item, state, folder / layout.scheduler_file(item.place))
    if pending.scaler is not None:
        run.precision.load_state_dict(pending.scaler)
    for item, state in zip(contents.custom, pending.custom, strict=True):
        _give(item, state, folder / layout.custom_file(item.place))
    for item, state in zip(contents.loaders, pending.samplers, strict=True):
        if state is not None:
            give_sampler(item.thing, state)
    for item, state in zip(contents.loaders, pending.loaders, strict=True):
        if state is not None:
            item.thing.load_state_dict(state)
    unlike = [*pending.unlike, *hand_out_progress(run, contents, pending.progress)]
    if "grad_sync" in pending.progress:
        run.grad_sync.load_state_dict(pending.progress["grad_sync"])
        give_gradients(run, contents, pending.gradients)
    if pending.step is not None:
        run.step = pending.step
    if pending.missing:
        warn_caller(
            f"{pending.folder} does not hold all of this run, which goes on with what it has of: {', '.join(pending.missing)}"
        )
    if pending.world_size is not None:
        unlike.append("the random generators of each process, which go on by themselves")
        warn_caller(
            f"{pending.folder} was saved by {pending.world_size} processes, now there are {run.world.size}. What is not as it was: "
            f"{'; '.join(unlike)}"
        )
    elif unlike:
        warn_caller(f"not everything goes on as it was saved in {pending.folder}: {'; '.join(unlike)}")
    if pending.random:
        restore_generators(pending.random)


@contextmanager
def giving(who: str, place: Path) -> Iterator[None]:
    """Around what changes the run: CheckpointError for whatever an object raises there, since the code is the user's, and the run is a mixture."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{who} could not take its state from {place} ({type(error).__name__}: {error}). Others are loaded by now, so this run holds parts "
            "of two: load a checkpoint that fits before it goes on, or start it again"
        ) from error


def _give(item: Item, state: Any, file: Path) -> None:
    with giving(item.kind_of, file):
        item.thing.load_state_dict(state)


def _check_keys(file: Path, state: Any, keys: Iterable[str]) -> None:
    """CheckpointError unless the content of `file` is a mapping that has all of `keys`."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} cannot be loaded: it holds a {type(state).__name__}, not a dict")
    lacking = [key for key in keys if key not in state]
    if lacking:
        raise CheckpointError(f"{file} cannot be loaded: it has no {', '.join(lacking)}")


def _scheduler(item: Item, folder: Path, load_kwargs: Mapping[str, Any]) -> Any:
    file = folder / layout.scheduler_file(item.place)
    state = read_file(file, load_kwargs)
    own = item.thing.state_dict()
    if isinstance(own, Mapping):
        _check_keys(
            file, state, [key for key in own if key == "last_epoch"]
        )  # that of torch's, in every version
    return state


def _read_if_there(file: Path, load_kwargs: Mapping[str, Any], missing: list[str], what: str) -> Any:
    if file.is_file():
        return read_file(file, load_kwargs)
    missing.append(f"{what} ({file.name})")
    return None


def _scaler(
    run: Run, folder: Path, load_kwargs: Mapping[str, Any], missing: list[str], unlike: list[str]
) -> Any:
    """The state of the scaler that was saved; None where gradients were not scaled: one that is switched off has an empty state."""
    file = folder / layout.SCALER
    state = read_file(file, load_kwargs) if file.is_file() else None
    saved = None if isinstance(state, Mapping) and not state else state
    what = f"the scale of the gradients ({layout.SCALER})"
    if scales(run) and saved is None:
        missing.append(what)
    elif scales(run):
        _check_keys(file, saved, run.precision.state_dict())
    elif saved is not None:
        unlike.append(f"{what}, as this run scales none")
    return saved


def _loader_of_others(
    item: Item, folder: Path, manifest: Manifest | None, load_kwargs: Mapping[str, Any]
) -> Any:
    """The state of a stateful loader in a checkpoint of accelerate, which tells nothing else of it."""
    file = folder / layout.loader_file(item.place)
    if (
        manifest is not None
        or not getattr(item.thing, "use_stateful_dataloader", False)
        or not file.is_file()
    ):
        return None
    return read_file(file, load_kwargs)


def _progress(
    run: Run, folder: Path, manifest: Manifest | None, missing: list[str], unlike: list[str]
) -> dict[str, Any]:
    """Where this rank stood; rank 0's place, without its half window, when another number of ranks saved."""
    same = manifest is None or manifest.world_size == run.world.size
    file = folder / layout.progress_file(run.world.rank if same else 0)
    if manifest is None and not file.is_file():  # as accelerate writes it
        missing.append(f"the positions of the loaders and of the accumulation window ({file.name})")
        return {}
    read = read_file(file, {})
    _check_keys(file, read, ("step", "grad_sync", "positions"))
    progress = dict(read)
    if same:
        return progress
    progress, lost = of_other_ranks(progress)
    unlike += lost
    return progress


def _step(folder: Path, progress: Mapping[str, Any], random: Mapping[str, Any], rank: int | None) -> Any:
    """The step that this rank was at; None where no file tells. CheckpointError where the two files of `rank` (None: they are of two) differ."""
    step, other = progress.get("step"), random.get("step")
    if rank is not None and None not in (step, other) and step != other:
        raise CheckpointError(
            f"the checkpoint {folder} is a mixture of two: {layout.progress_file(rank)} is of step {step}, {layout.random_file(rank)} of step "
            f"{other}"
        )
    return other if step is None else step


def _random(run: Run, folder: Path, missing: list[str]) -> dict[str, Any] | None:
    path = folder / layout.random_file(run.world.rank)
    if path.is_file():
        return read_random(path)
    missing.append(f"the random generators ({path.name})")
    return None
