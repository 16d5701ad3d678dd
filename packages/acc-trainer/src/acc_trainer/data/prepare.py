"""From a torch DataLoader to a rank's own: which samples it reads, in which order, and where they go."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from acc_ops.random import torch_state
from acc_ops.world import World, current_world
from acc_trainer.data.adapter import (
    DataLoaderAdapter,
    clone_loader,
    index_sampler,
    is_stream,
    iterates_itself,
    replace_sampler,
    with_indices,
)
from acc_trainer.data.agreed import agreed
from acc_trainer.data.already_split import NOT_SPLIT, drops_last, parts_of, tail_of_distributed
from acc_trainer.data.batches import CollateWithTail
from acc_trainer.data.dealing import dealt
from acc_trainer.data.dispatch import DataLoaderDispatcher
from acc_trainer.data.in_step import own_shards as shards_of
from acc_trainer.data.loader import DataLoaderShard
from acc_trainer.data.samplers import SkipBatchSampler, check_skip, get_sampler, is_random, seedable
from acc_trainer.data.shard import BatchSamplerShard, IndexShard, IterableDatasetShard
from acc_trainer.data.shares import shares_of
from acc_trainer.data.skipping import SkipDataLoader
from acc_trainer.data.torchdata_state import given_state, stateful_loader_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """Which share of the samples a rank takes."""

    ranks: int
    rank: int
    split_batches: bool
    even_batches: bool


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> Any:
    """A loader that gives this process its share of `dataloader`'s batches, on `device` if `put_on_device`.

    `dispatch_batches` lets rank 0 read and send; None means so for iterable data sets that go to a device. The number and index of
    the process come from the current world unless given; with `torch_device_mesh` ranks that differ only in tensor or context parallelism
    get the same data. Everything else of the loader stays: its class, workers, collate function, attributes. Raises `ValueError` for
    `dispatch_batches=True` without `put_on_device`, for `split_batches` with a batch size the processes do not divide, and for a stateful
    loader that was given a state which counts other batches.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"a torch DataLoader is needed, got {type(dataloader).__name__}")
    if is_prepared(dataloader):
        return dataloader
    world = current_world()
    ranks, rank = _data_ranks(torch_device_mesh, world, num_processes, process_index)
    processes = num_processes or world.size
    obstacle = _obstacle_to_dispatching(dataloader, put_on_device, ranks)
    if dispatch_batches is None:
        dispatch_batches = is_stream(dataloader) and obstacle is None
    if dispatch_batches and obstacle is not None:
        raise ValueError(f"dispatch_batches=True {obstacle}")
    share = _Share(ranks=ranks, rank=rank, split_batches=split_batches, even_batches=even_batches)
    _check_split(dataloader, share)
    together = world if num_processes in (None, world.size) and world.size > 1 else None
    by_epoch = use_stateful_dataloader or (processes > 1 and not dispatch_batches)
    base, seeded = _ordered(dataloader, by_epoch, use_seedable_sampler, data_seed, together)
    settings: dict[str, Any] = {
        "device": device if put_on_device else None,
        "rng_types": rng_types,
        "synchronized_generator": None if seeded is not None else _generator_of(base),
        "drop_last": drops_last(base),
        "non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "seeded": seeded,
        "shares": ranks,
        "world": _as_seen_by(world, ranks),
    }
    if dispatch_batches:
        base = _as_stateful(base) if use_stateful_dataloader else base
        made = DataLoaderDispatcher.over(
            base, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, rank=rank, **settings
        )
        return _where_it_stood(made, dataloader)
    tail = tail_of_distributed(base, ranks)
    split = tail is not NOT_SPLIT
    whole = base
    if not split and ranks > 1:
        base = _sharded(base, share, agree=agreed if together is not None else None)
    own_shards = base is not whole and is_stream(base) and not isinstance(base.dataset, IterableDatasetShard)
    settings.update(tail=tail if split else None, keeps_step=own_shards and even_batches, rank=rank)
    base = _as_stateful(base) if use_stateful_dataloader else base
    return _where_it_stood(DataLoaderShard.over(base, **settings), dataloader)


def is_prepared(loader: Any) -> bool:
    """Whether `loader` gives this process its share already; one that only leaves out batches does not."""
    return isinstance(loader, DataLoaderAdapter) and not isinstance(loader, SkipDataLoader)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The same loader without its first `num_batches` batches; a prepared one stays at the same epoch and position.

    Its pass counts as the epoch of the loader it was made from, which goes on with the next one. Samples are left out by index, without
    being read, unless the data set is a stream or the loader's class has an `__iter__` of its own: those are read and dropped.
    """
    count = check_skip(num_batches)
    if isinstance(dataloader, DataLoaderShard) and dataloader.position.is_dealt and count:
        if count == dataloader.position.saved_batches:
            return dealt(dataloader)
        logger.warning(
            "skip_first_batches(loader, %d) counts batches from the beginning of the epoch, but the checkpoint was saved by another number of "
            "processes, or with batches of another size, so they are not those that it has seen: use accelerator.rest_of_epoch(loader)",
            count,
        )
    if isinstance(dataloader, (DataLoaderShard, SkipDataLoader)):
        twin = dataloader._twin(dataloader.base_dataloader)
        twin.skip_batches = dataloader.skip_batches + count
        return twin
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"a data loader is needed, got {type(dataloader).__name__}")
    if is_stream(dataloader) or iterates_itself(dataloader):
        return SkipDataLoader.over(dataloader, count)
    return with_indices(dataloader, SkipBatchSampler(index_sampler(dataloader), count))


def rest_of_epoch(dataloader: Any) -> Any:
    """A prepared loader without the batches of its epoch that a loaded checkpoint has seen; the loader itself where there are none.

    So a loop can iterate `rest_of_epoch(loader)` in every epoch. Where another number of processes saved, or batches had another size, the samples
    that nobody has seen are dealt out to the present ones. `TypeError` for a loader that was not prepared.
    """
    if not isinstance(dataloader, DataLoaderShard):
        raise TypeError(
            f"rest_of_epoch needs a loader that prepare() has made, got {type(dataloader).__name__}; for others there is "
            "skip_first_batches"
        )
    position = dataloader.position
    if position.is_dealt:
        return dealt(dataloader)
    return skip_first_batches(dataloader, position.seen) if position.seen else dataloader


def _data_ranks(
    mesh: Any, world: World, num_processes: int | None, process_index: int | None
) -> tuple[int, int]:
    """How many shares the data has, and which one is this process's."""
    ranks = world.size if num_processes is None else num_processes
    rank = world.rank if process_index is None else process_index
    if not 0 <= rank < ranks:
        raise ValueError(f"process_index must be in 0..{ranks - 1}, got {rank}")
    shares = shares_of(mesh, rank, ranks)
    return shares.count, shares.mine


def _obstacle_to_dispatching(loader: Any, put_on_device: bool, ranks: int) -> str | None:
    """Why rank 0 cannot read for the others; None where it can."""
    if not put_on_device:
        return "sends batches to the ranks' devices, so it needs put_on_device=True"
    if ranks > 1 and parts_of(loader) > 1:
        return (
            f"lets rank 0 read for all, but this loader's samples are split over {parts_of(loader)} ranks already, so the other parts would be "
            "lost: use dispatch_batches=False, or a loader over all samples"
        )
    return None


def _as_seen_by(world: World, ranks: int) -> World | None:
    """The world to ask at each pass; None (the current one) where the caller named other ranks than there are."""
    return world if world.size == ranks else None


def _check_split(loader: Any, share: _Share) -> None:
    if not share.split_batches or share.ranks == 1:
        return
    size = (
        loader.batch_size
        if loader.batch_size is not None
        else getattr(loader.batch_sampler, "batch_size", None)
    )
    if size is None or size % share.ranks:
        raise ValueError(
            f"split_batches=True needs a batch size that is a multiple of the {share.ranks} processes, got {size}: "
            "choose another batch_size, or split_batches=False"
        )


def _ordered(
    loader: Any,
    by_epoch: bool,
    use_seedable_sampler: bool,
    data_seed: int | None,
    together: World | None,
) -> tuple[Any, Any]:
    """The loader with its random sampler ordered by (seed, epoch), and what to tell the epoch; unchanged where that is not needed.

    On one rank torch's sampler stays, so that the order is that of a plain loop. With `by_epoch` it must follow from the epoch: on several
    ranks, which need the same order, and for a stateful loader, which goes on in the middle of it.
    """
    sampler = get_sampler(loader)
    wanted = by_epoch or (use_seedable_sampler and isinstance(sampler, RandomSampler))
    if not wanted or not is_random(sampler):
        return loader, None
    given = sampler.generator if sampler.generator is not None else loader.generator
    if use_seedable_sampler and data_seed is not None:
        seed = int(data_seed)
    elif given is not None:
        seed = given.initial_seed()
    elif use_seedable_sampler:
        seed = torch.initial_seed()
    else:
        seed = _drawn_seed()
    if together is not None:
        seed = int(together.comm.broadcast_object(seed))
    made, seeded = seedable(sampler, seed % (1 << 63))
    return replace_sampler(loader, made), seeded


def _drawn_seed() -> int:
    """What torch's generator would give next; it is not moved, so one rank and several draw the same afterwards."""
    twin = torch.Generator()
    twin.set_state(torch_state())
    return int(torch.empty((), dtype=torch.int64).random_(generator=twin).item())


def _generator_of(loader: Any) -> torch.Generator | None:
    """The generator a sampler or a stream of the user's own draws from."""
    source = loader.dataset if is_stream(loader) else get_sampler(loader)
    generator = getattr(source, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _sharded(loader: Any, share: _Share, agree: Callable[..., Any] | None) -> Any:
    """The loader with this rank's share of the indices, on which the ranks `agree`, or of the stream."""
    if isinstance(loader, SkipDataLoader):
        raise ValueError(
            f"this loader leaves out its first {loader.skip_batches} batches by reading them, so it cannot be split over {share.ranks} processes any "
            "more: prepare the loader first, then skip_first_batches(prepared, n)"
        )
    if is_stream(loader):
        return _sharded_stream(loader, share)
    indices = index_sampler(loader)
    if loader.batch_sampler is None and not isinstance(indices, BatchSampler):
        shard: Any = IndexShard(indices, share.ranks, share.rank, share.even_batches)
    else:
        shard = BatchSamplerShard(indices, share.ranks, share.rank, share.split_batches, share.even_batches)
    shard.agree = agree
    return with_indices(loader, shard)


def _sharded_stream(loader: Any, share: _Share) -> Any:
    own = shards_of(loader.dataset, share.ranks, share.rank)
    if own is not None:
        replaced: dict[str, Any] = {"dataset": own}
        if share.split_batches:
            replaced.update(_smaller_batches(loader, share))
        return clone_loader(loader, **replaced)
    shard = IterableDatasetShard(
        loader.dataset,
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=share.ranks,
        process_index=share.rank,
        split_batches=share.split_batches and loader.batch_size is not None,
    )
    replaced = {"dataset": shard}
    if not iterates_itself(loader):  # which would meet the marks
        shard.marks = True
        replaced["collate_fn"] = CollateWithTail(loader.collate_fn)
    elif loader.num_workers:
        logger.warning(
            "%s has an __iter__ of its own and workers, so which rows of a stream only fill up its last batches is not known: gather_for_metrics "
            "will count them; use dispatch_batches=True where that matters",
            type(loader).__name__,
        )
    if shard.split_batches:
        replaced.update(_smaller_batches(loader, share))
    return clone_loader(loader, **replaced)


def _where_it_stood(made: Any, loader: Any) -> Any:
    """The prepared loader, to go on behind the state that the stateful `loader` was given before, if any."""
    if made.base_dataloader is not loader and given_state(loader) is not None:
        raise ValueError(
            f"this {type(loader).__name__} was given a state before it was prepared, and prepared it has another order or a share of the batches, so "
            "the state does not tell where it stands: prepare it first, then prepared.load_state_dict(state) with the state of a prepared loader"
        )
    made._take_given()
    return made


def _smaller_batches(loader: Any, share: _Share) -> dict[str, Any]:
    """What a loader over a stream has to be given to read batches of one rank's share."""
    size = loader.batch_size // share.ranks
    return {"batch_size": size, "batch_sampler": BatchSampler(loader.sampler, size, loader.drop_last)}


def _as_stateful(loader: Any) -> Any:
    """The loader as torchdata's StatefulDataLoader."""
    stateful = stateful_loader_class()
    if isinstance(loader, stateful):
        return loader
    if iterates_itself(loader):
        raise ValueError(
            f"{type(loader).__name__} has an __iter__ of its own, which a stateful loader would lose: "
            "derive it from torchdata's StatefulDataLoader, or leave use_stateful_dataloader out"
        )
    known = set(inspect.signature(stateful.__init__).parameters)
    kept = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
            "in_order",
        )
        if name in known and hasattr(loader, name)
    }
    if is_stream(loader):
        return stateful(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **kept)
    if loader.batch_sampler is None:
        return stateful(loader.dataset, batch_size=None, sampler=loader.sampler, **kept)
    return stateful(loader.dataset, batch_sampler=loader.batch_sampler, **kept)
