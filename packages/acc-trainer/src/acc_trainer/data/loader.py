"""One rank's loader: its own share of the batches, and the last one known when it is handed out.

[Note: when a batch is read] The last batch must be known before it is handed out. Where the number of batches is exact (torch's own samplers), a
batch is read when it is asked for, as a plain loop does, so that random augmentation and dropout draw in the same order. With other samplers, and no
workers, the *indices* of one batch are read ahead, and its data when they are asked for. Elsewhere (streams, workers, loaders that iterate in a way of their
own) one batch is read ahead; the position keeps where the generators were before that, so that a resumed run reads it again with the same draws.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from acc_ops.rng_sharing import synchronize_rng_states
from acc_ops.world import World, current_world
from acc_trainer.data.adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    exact_length,
    has_deaf_workers,
    index_sampler,
    is_stream,
    iterates_itself,
    opened_as_kept,
    replace_sampler,
    with_indices,
)
from acc_trainer.data.batch_rows import RowRule
from acc_trainer.data.batches import BatchWithTail, handing_out
from acc_trainer.data.dealing import layout_of, may_end_apart, samples_per_step, take_place
from acc_trainer.data.in_step import in_step
from acc_trainer.data.samplers import (
    OneAhead,
    ResumedIndices,
    SkipBatchSampler,
    check_skip,
    get_sampler,
)
from acc_trainer.data.shard import BatchSamplerShard, IndexShard, IterableDatasetShard, Tail
from acc_trainer.data.shares import tail_of_shares
from acc_trainer.data.skipping import (
    END,
    Skipped,
    dropping,
    first_read,
    replaying,
)

logger = logging.getLogger(__name__)


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that hands out this rank's batches on `device`.

    `rng_types` are synchronised over the ranks when a pass begins, `synchronized_generator` among them. `skip_batches` leaves out the
    first batches of each pass. `iteration` is the epoch to begin with. Other arguments go to `DataLoader`.
    """

    reads_for_all: ClassVar[bool] = False  # whether one rank reads what all get

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._configure(
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            drop_last=_drop_last,
            non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
        )

    @classmethod
    def over(cls, base: Any, **settings: Any) -> Any:
        """The same around a loader that exists already; `settings` as for `_configure`."""
        made = object.__new__(cls)
        made._adopt(base)
        made._configure(**settings)
        return made

    def _configure(
        self,
        *,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        drop_last: bool = False,
        non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        world: World | None = None,
        rank: int | None = None,
        shares: int | None = None,
        seeded: Any = None,
        tail: Tail | None = None,
        keeps_step: bool = False,
    ) -> None:
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = check_skip(skip_batches)
        self._drop_last = drop_last
        self._non_blocking = non_blocking
        self.torch_device_mesh = torch_device_mesh
        self._world = world
        self._rank = rank  # whose share this is, where it is not the world's
        self._shares = shares  # how many there are, where the loader does not show it
        self._seeded = seeded  # what orders the samples by (seed, epoch), if we put it there
        self._tail = tail  # of a loader that was already split over the ranks
        self._keeps_step = keeps_step  # with ranks of which nobody knows how many batches they have
        self._warned = False
        self._deals = False  # a rest of an epoch that was dealt out anew
        self.position.epoch = iteration
        self.position.seed = getattr(seeded, "initial_seed", getattr(seeded, "seed", None))
        if seeded is None:
            self.position.generator = getattr(get_sampler(self.base_dataloader), "generator", None)

    # what it is --------------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The ranks this loader was split over."""
        return self._world if self._world is not None else current_world()

    def __len__(self) -> int:
        return max(0, self._steps(len(self.base_dataloader)) - self.skip_batches)

    def _steps(self, batches: int) -> int:
        """The steps of a rank, and of an epoch, that so many batches of the loader below are."""
        return batches

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks together take in one step; 0 where batches have no fixed size."""
        return samples_per_step(self)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set, over all ranks."""
        return len(self.dataset)

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        dataset = self.base_dataloader.dataset
        return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

    def get_sampler(self) -> Any:
        """The sampler that orders the samples."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Let `sampler` order the samples from the next pass on."""
        self.base_dataloader = replace_sampler(self.base_dataloader, sampler)
        self._seeded = sampler if hasattr(sampler, "set_epoch") else None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`; told to the batch sampler, the sampler and the data set where they listen."""
        self.position.set_epoch(epoch)
        self._tell_epoch(self.position.epoch)

    def _tell_epoch(self, epoch: int) -> None:
        base = self.base_dataloader
        told: list[Any] = []
        if not self._warned and has_deaf_workers(base, self.dataset):
            self._warned = True
            logger.warning(
                "persistent workers do not hear of epoch %d: %s.set_epoch changes the data set of this process only; keep its epoch in a "
                "tensor with share_memory_(), or use persistent_workers=False",
                epoch,
                type(self.dataset).__name__,
            )
        for listener in (self._seeded, base.batch_sampler, base.sampler, get_sampler(base), base.dataset):
            if hasattr(listener, "set_epoch") and not any(listener is one for one in told):
                told.append(listener)
                listener.set_epoch(epoch)

    def _layout(self) -> dict[str, Any]:
        return layout_of(self)

    def _position_loaded(self, state: Mapping[str, Any]) -> None:
        self._set_seed(self.position.seed)
        self._forget_passes(workers=True)
        if take_place(self, state):
            super()._position_loaded(state)

    def _set_seed(self, seed: int | None) -> None:
        if self._seeded is not None and seed is not None:
            name = "initial_seed" if hasattr(self._seeded, "initial_seed") else "seed"
            setattr(self._seeded, name, seed)

    # a pass ------------------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        position = self.position
        self._take_given()
        itself = position.goes_on
        position.goes_on = False
        skip = position.batches if itself else self.skip_batches
        replay = position.begin(skip, deals=self._deals, itself=itself)
        self._tell_epoch(position.epoch)
        self._synchronize_generators()
        if not itself:
            self._forget_passes(workers=False)
        batches = self._pass(self._batches(skip, replay, itself))  # opened now, as torch draws when it is
        position.waiting = weakref.ref(batches)
        return batches

    def _pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out the batches of a pass; it counts from the moment the first one is asked for."""
        self.position.start()
        self.dl_state_dict = None
        finished = False
        self.begin()
        try:
            reading = self.grad_sync.reading
            yield from batches if reading is None else reading(batches)
            finished = True
        finally:
            if finished:
                self.dl_state_dict = None
            self.end(finished)

    def _synchronize_generators(self) -> None:
        if not self.rng_types or self.world.size == 1:
            return
        types = [
            kind
            for kind in self.rng_types
            if str(getattr(kind, "value", kind)) != "generator" or self.synchronized_generator is not None
        ]
        if types:
            synchronize_rng_states(types, self.synchronized_generator)

    def _batches(self, skip: int, replay: bool, itself: bool) -> Iterator[Any]:
        """The batches of this pass, on the device."""
        self.position.apart |= may_end_apart(self)
        skipped = Skipped()
        if self._keeps_step and self.world.size > 1:
            return self._in_step(self._open(skip, replay, itself, skipped), skipped, skip)
        total = exact_length(self.base_dataloader)
        if total is None and self._by_index and not self.base_dataloader.num_workers:
            ahead = self.position.reader = OneAhead(self.position.following)
            return self._indices_ahead(self._open(skip, replay, itself, skipped, ahead), skip, ahead)
        if total is None:
            return self._one_ahead(self._open(skip, replay, itself), skip)
        if skip >= total:
            return iter(())
        return self._counted(self._open(skip, replay, itself), skip, total)

    @property
    def _by_index(self) -> bool:
        """Whether the base loader reads what its sampler says, so that another one can be put in for a pass."""
        base = self.base_dataloader
        return not (is_stream(base) or iterates_itself(base) or self.use_stateful_dataloader)

    def _open(
        self,
        skip: int,
        replay: bool,
        itself: bool,
        skipped: Skipped | None = None,
        ahead: OneAhead | None = None,
    ) -> Iterator[Any]:
        """The iterator of a pass over the base loader from batch `skip` on; `skipped` is told what the pass would have begun with.

        `ahead` reads the indices of one more batch.
        """
        base = self.base_dataloader
        if itself and self.position.drops is not None:
            skip, self.position.drops = self.position.drops, None
        elif itself:
            with replaying(self.position) if replay else contextlib.nullcontext():
                return iter(base)
        skipped = skipped if skipped is not None else Skipped()
        with replaying(self.position) if replay else contextlib.nullcontext():
            if not self._by_index:
                return dropping(self._whole(), skip, skipped)
            if not replay and not skip:
                return (
                    self._whole()
                    if ahead is None
                    else iter(with_indices(base, ahead.over(index_sampler(base))))
                )
            indices = index_sampler(base)
            rest = skipped.indices = (
                ResumedIndices(indices, skip, self.position.following)
                if replay
                else SkipBatchSampler(indices, skip)
            )
            loader = with_indices(base, rest if ahead is None else ahead.over(rest))
            batches = opened_as_kept(loader) if self.position.reused else iter(loader)
            if isinstance(rest, ResumedIndices):
                rest.prime()
            return batches

    def _counted(self, batches: Iterator[Any], count: int, total: int) -> Iterator[Any]:
        """Hand out batches whose number is known."""
        hand_out, others = handing_out(self), self._ends_of_ranks() - {total}
        self.position.outlasted = max(others, default=0) > total
        for batch in batches:
            count += 1
            if count == total:
                next(
                    batches, None
                )  # its end: samplers draw once more there, which a saved position must include
                yield hand_out(batch, count, True, self._tail_of(count, True))
            else:
                yield hand_out(batch, count, False, ends_window=count in others)

    def _indices_ahead(self, batches: Iterator[Any], count: int, ahead: OneAhead) -> Iterator[Any]:
        """Hand out batches whose number is not known, but of which the next one's indices were read."""
        hand_out = handing_out(self)
        for batch in batches:
            count += 1
            yield hand_out(batch, count, ahead.ended, self._tail_of(count, ahead.ended))

    def _one_ahead(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Hand out batches whose number is not known."""
        hand_out = handing_out(self)
        batch = first_read(batches, self.position)
        while batch is not END:
            following = self._read_ahead(batches)
            count += 1
            is_last = following is END
            if type(batch) is BatchWithTail:
                yield hand_out(batch.batch, count, is_last, batch.tail)
            else:
                yield hand_out(batch, count, is_last, self._tail_of(count, is_last))
            batch = following

    def _in_step(self, batches: Iterator[Any], skipped: Skipped, skip: int) -> Iterator[Any]:
        """Hand out batches of which the other ranks may have more or fewer."""
        hand_out = handing_out(self)
        first = first_read(batches, self.position)
        steps = in_step(
            first,
            lambda: self._read_ahead(batches),
            RowRule.of(self.base_dataloader).count
            if self.base_dataloader.batch_size is not None
            else lambda _: 1,
            self.world,
            drop_last=self._drop_last,
            begin=skipped.batches[0] if skipped.batches else first,
        )
        for count, step in enumerate(steps, start=skip + 1):
            tail = tail_of_shares(step.tail, self.torch_device_mesh, self.world.size)
            yield hand_out(step.batch, count, step.is_last, tail)

    def _ends_of_ranks(self) -> frozenset[int]:
        """After how many batches the ranks come to their end, where the loader is split by its indices."""
        indices = index_sampler(self.base_dataloader)
        if not isinstance(indices, (BatchSamplerShard, IndexShard)):
            return frozenset()
        return frozenset(indices.length_of(rank) for rank in range(indices.num_processes))

    def _read_ahead(self, batches: Iterator[Any]) -> Any:
        """What follows the batch that is handed out next, or `END`; a saved position is the one before that."""
        if self.use_stateful_dataloader:
            self.dl_state_dict = dict(self.base_dataloader.state_dict())
            self.adjust_state_dict_for_prefetch()
        if not self.base_dataloader.num_workers:  # nothing here is moved by what a worker draws
            self.position.note_reading_ahead()
        following = next(batches, END)
        if following is END and self.dl_state_dict is not None:
            self.dl_state_dict["_iterator_finished"] = True
        return following

    def _tail_of(self, number: int, is_last: bool) -> Tail | None:
        """What the group of batch `number` consists of, where it is not whole."""
        if self._tail is not None:
            return self._tail if is_last else None
        base = self.base_dataloader
        if isinstance(base.dataset, IterableDatasetShard):  # where no worker marks the batch
            return base.dataset.tail if is_last else None
        indices = index_sampler(base)
        if is_last and iterates_itself(base):  # which may leave out batches, or join them
            return getattr(indices, "last_tail", None)
        tail_of = getattr(indices, "tail_of", None)
        return None if tail_of is None else tail_of(number)
