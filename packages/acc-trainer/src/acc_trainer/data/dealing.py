"""What all ranks together have read of an epoch, and the rest of it dealt out anew: to another number of ranks, in batches of another size.

[Note: a place in the order of all ranks] One rank counts its own batches. What they stand for depends on how the loader was split, which its *layout*
tells: how many batches of the loader below all ranks read in a step, and how many samples each holds. A stretch of an epoch that one run read is
kept as (reads, samples each, workers); after a resume the next run begins behind all stretches, with the order that the epoch had from its
first sample on: that of the saved seed, or what the saved generators draw.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from acc_trainer.data.adapter import (
    clone_loader,
    index_sampler,
    is_stream,
    iterates_itself,
    replace_sampler,
    with_indices,
)
from acc_trainer.data.already_split import parts_of
from acc_trainer.data.position import LoaderPosition
from acc_trainer.data.samplers import SkipBatchSampler, SkippedSamples, get_sampler, is_random, seedable
from acc_trainer.data.shard import BatchSamplerShard, IndexShard, IterableDatasetShard
from acc_trainer.data.torchdata_state import batches_in

Stretch = Mapping[str, Any]  # reads, each, workers


def layout_of(loader: Any) -> dict[str, Any]:
    """How a prepared loader is split; `why` names what keeps another run from dealing its epoch out anew."""
    base, ranks = loader.base_dataloader, _shares_of(loader)
    reads, each = _in_a_step(loader, base)
    layout = {
        "ranks": ranks,
        "reads": reads,
        "each": each,
        "workers": base.num_workers,
        "stream": is_stream(base),
    }
    if loader.use_stateful_dataloader:
        layout["stateful"] = True
        if ranks > 1 and not loader.reads_for_all:
            layout["why"] = "a stateful loader keeps a state for each process"
    elif iterates_itself(base):
        layout["why"] = f"{type(base).__name__} iterates in a way of its own"
    elif ranks > 1 and not loader.reads_for_all and not _is_our_split(base):
        layout["why"] = "its samples were split before it was prepared, or by shards of their own"
    elif parts_of(base) not in (1, ranks):
        layout["why"] = "its samples were split before it was prepared"
    return layout


def samples_per_step(loader: Any) -> int:
    """Samples that all ranks together take in one step of a loader that is not dispatched; 0 where batches have no fixed size."""
    base = loader.base_dataloader
    indices = index_sampler(base)
    if isinstance(indices, SkipBatchSampler):
        indices = indices.batch_sampler
    if isinstance(indices, BatchSamplerShard):
        return (indices.batch_size or 0) * (1 if indices.split_batches else indices.num_processes)
    if isinstance(indices, IndexShard):
        return indices.num_processes
    if isinstance(base.dataset, IterableDatasetShard):
        return base.dataset.group_size
    size = getattr(indices, "batch_size", None) or base.batch_size or 0
    return int(size) * (loader.world.size if loader._tail is not None else 1)


def may_end_apart(loader: Any) -> bool:
    """Whether the ranks may get unequal numbers of batches in a pass."""
    base = loader.base_dataloader
    if loader.world.size == 1 or loader.reads_for_all or loader._keeps_step:
        return False
    return not _is_our_split(base) or getattr(index_sampler(base), "even_batches", True) is False


def take_place(loader: Any, state: Mapping[str, Any]) -> bool:
    """Whether the loaded `state` counts in batches of this loader. Where it does not, the position is told where in the epoch it stands."""
    position: LoaderPosition = loader.position
    saved, now = state.get("layout"), layout_of(loader)
    told = state.get("dealt") or {}
    # one run may have drawn its order from a seed, and another split in the same way from the generators: a dispatching one
    same_order = bool(told) or (state.get("seed") is None) == (position.seed is None)
    if saved is None or (_same_split(saved, now) and same_order):
        return True
    before = [*told.get("before", ()), _stretch_of(saved, state)]
    if state.get("finished"):
        return False
    total = sum(one["reads"] for one in before)
    if not total:
        position.begin_anew(None)
        return False
    why = _obstacle(saved, now)
    if why is None and now.get("stateful") and state["loader"] and batches_in(state["loader"]) != total:
        why = "a loader that was not stateful had begun it"
    if why is not None:
        position.begin_anew(why)
    elif now.get("stateful"):
        position.go_on_behind(total // now["reads"], loader._give_to_base(state["loader"]))
    else:
        position.deal(before, told["seed"] if told else state.get("seed"))
    return False


def dealt(loader: Any) -> Any:
    """The loader over the rest of the epoch that was loaded."""
    position: LoaderPosition = loader.position
    told = position.dealt or {}
    base, seeded = loader.base_dataloader, loader._seeded
    if is_stream(base):
        base = clone_loader(base, dataset=_rest_of_stream(base.dataset, told["before"]))
    else:
        base, seeded = _ordered_as_saved(base, seeded, position, told["seed"])
        base = with_indices(base, _rest_of(index_sampler(base), told["before"]))
    twin = loader._twin(base)
    twin.skip_batches, twin._deals, twin._seeded = position.batches, True, seeded
    return twin


class StreamRest(IterableDataset):
    """A stream without what was read of it; each worker leaves out what the worker of its number has read."""

    def __init__(self, dataset: Any, before: Sequence[Stretch]) -> None:
        self.dataset = dataset
        self.before = list(before)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return itertools.islice(iter(self.dataset), _read_by(self.before, worker), None)

    def __len__(self) -> int:
        workers = max(1, *(one["workers"] for one in self.before))
        return max(0, len(self.dataset) - sum(_read_by(self.before, worker) for worker in range(workers)))

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "before"):  # not there yet: being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _same_split(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a rank's count of batches means the same in both layouts."""
    alike = all(one.get(key) == other.get(key) for key in ("ranks", "reads", "each", "stream"))
    return alike and (not one["stream"] or max(1, one["workers"]) == max(1, other["workers"]))


def _stretch_of(layout: Mapping[str, Any], state: Mapping[str, Any]) -> Stretch:
    """What all ranks read until this `state` of the position: of a stateful loader as it tells, since an earlier layout may have left part of a step."""
    reads = int(state["batches"]) * layout["reads"]
    if layout.get("stateful"):
        reads = batches_in(state.get("loader", {})) or reads
    return {"reads": reads, "each": layout["each"], "workers": layout["workers"]}


def _obstacle(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why an epoch of the layout `saved` cannot be dealt out in the layout `now`."""
    why = saved.get("why") or now.get("why")
    if why is not None:
        return str(why)
    if saved["stream"] != now["stream"]:
        return "it was a stream and is none, or the other way round"
    if now["stream"] and max(1, saved["workers"]) != max(1, now["workers"]):
        return f"{saved['workers']} workers read the stream, now there are {now['workers']}"
    if now["stream"] and None in (saved["each"], now["each"]):
        return "its batches have no fixed size"
    if now.get("stateful") and (saved["each"] != now["each"] or not saved.get("stateful")):
        return "a stateful loader goes on from its own state alone, which counts batches of one size"
    return None


def _read_by(before: Sequence[Stretch], worker: int) -> int:
    """The elements that a worker of this number has read; workers read batches in turn, each pass from the first on."""
    total = 0
    for one in before:
        whole, rest = divmod(one["reads"], max(1, one["workers"]))
        total += (whole + (worker < rest)) * (one["each"] or 0)
    return total


def _in_a_step(loader: Any, base: Any) -> tuple[int, int | None]:
    """The batches that all ranks read from the loader below while each hands out one, and the samples in each of them."""
    plain = loader.batches_per_step if loader.reads_for_all else 1
    if isinstance(base.dataset, IterableDatasetShard):
        return 1, base.dataset.group_size
    if is_stream(base):
        return plain, base.batch_size or 1
    indices = index_sampler(base)
    if isinstance(indices, IndexShard):
        return indices.num_processes, 1
    if isinstance(indices, BatchSamplerShard):
        whole, reads = indices.batch_sampler, 1 if indices.split_batches else indices.num_processes
    else:
        whole, reads = indices, plain
    if base.batch_sampler is None and not isinstance(whole, BatchSampler):
        return reads, 1
    return reads, whole.batch_size if type(whole) is BatchSampler else None


def _shares_of(loader: Any) -> int:
    """Into how many shares the samples are split."""
    indices, dataset = index_sampler(loader.base_dataloader), loader.base_dataloader.dataset
    if loader.reads_for_all:
        return int(loader.shares)
    if isinstance(indices, (BatchSamplerShard, IndexShard)):
        return indices.num_processes
    if isinstance(dataset, IterableDatasetShard):
        return dataset.num_processes
    return loader.world.size if loader._shares is None else int(loader._shares)


def _is_our_split(base: Any) -> bool:
    return isinstance(base.dataset, IterableDatasetShard) or isinstance(
        index_sampler(base), (BatchSamplerShard, IndexShard)
    )


def _rest_of_stream(dataset: Any, before: Sequence[Stretch]) -> Any:
    if not isinstance(dataset, IterableDatasetShard):
        return StreamRest(dataset, before)
    twin = copy.copy(dataset)
    twin.dataset = StreamRest(dataset.dataset, before)
    return twin


def _rest_of(indices: Any, before: Sequence[Stretch]) -> Any:
    """The indices behind those that were read, split as `indices` are."""
    if isinstance(indices, (BatchSamplerShard, IndexShard)):
        twin = copy.copy(indices)
        twin._tails = {}
        inner = "batch_sampler" if isinstance(indices, BatchSamplerShard) else "sampler"
        setattr(twin, inner, _rest_of(getattr(indices, inner), before))
        return twin
    sizes = [one["each"] for one in before]
    samples = sum(one["reads"] * (one["each"] or 0) for one in before)
    if type(indices) is BatchSampler and None not in sizes:
        return BatchSampler(SkippedSamples(indices.sampler, samples), indices.batch_size, indices.drop_last)
    if not isinstance(indices, BatchSampler) and set(sizes) == {1}:
        return SkippedSamples(indices, samples)
    return SkipBatchSampler(indices, sum(one["reads"] for one in before))


def _ordered_as_saved(base: Any, seeded: Any, position: LoaderPosition, seed: int | None) -> tuple[Any, Any]:
    """The loader in the order of the saved epoch, and what to tell the epoch: by the saved seed, or as torch draws it from the saved generators."""
    present = get_sampler(base)
    own = getattr(present, "made_from", present)
    if seed is not None and is_random(own):
        made, seeded = seedable(own, seed)
        return replace_sampler(base, made), seeded
    if seed is not None or own is present:
        return base, seeded
    twin = copy.copy(own)
    drawn = (position.rng or {}).get("generator")
    if drawn is not None and own.generator is not None:
        twin.generator = torch.Generator()
        twin.generator.set_state(drawn)
        if base.generator is own.generator:  # torch's loader draws from it, too
            base = clone_loader(base, generator=twin.generator)
    return replace_sampler(base, twin), None
