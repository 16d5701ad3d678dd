"""Loaders that are split already are used as they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader
from acc_trainer.data.shard import BatchSamplerShard, IterableDatasetShard
from acc_trainer.grad_sync import GradSync
from acc_trainer.metrics import gather_for_metrics


class Stream(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


def passed_through(make):
    """What each of two ranks sees of its own loader, and what they gather."""

    def work():
        world = current_world()
        made = prepare_data_loader(make(world.rank, world.size))
        made._grad_sync = GradSync()
        seen, gathered = [], []
        for batch in made:
            seen.append(batch.tolist())
            gathered += gather_for_metrics(batch, made.grad_sync, world).tolist()
        return seen, gathered

    return run_threads(2, work)


class OwnBatches(BatchSampler):
    """A batch sampler that splits its batches itself, over a sampler that does not."""

    def __init__(self, size, batch_size, rank, num_replicas):
        super().__init__(SequentialSampler(range(size)), batch_size, False)
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.rank, None, self.num_replicas)

    def __len__(self):
        return super().__len__() // self.num_replicas


def test_a_batch_sampler_that_splits_itself():
    seen = passed_through(
        lambda rank, ranks: DataLoader(range(8), batch_sampler=OwnBatches(8, 2, rank, ranks))
    )
    assert [batches for batches, _ in seen] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert seen[0][1] == list(range(8))


def test_a_shard_of_ours_made_by_hand():
    def make(rank, ranks):
        return DataLoader(
            range(7), batch_sampler=BatchSamplerShard(BatchSampler(range(7), 2, False), ranks, rank)
        )

    seen = passed_through(make)
    assert [batches for batches, _ in seen] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert seen[0][1] == list(range(7))


def test_a_stream_shard_of_ours_made_by_hand():
    seen = passed_through(
        lambda rank, ranks: DataLoader(IterableDatasetShard(Stream(range(7)), 2, False, ranks, rank), 2)
    )
    assert [batches for batches, _ in seen] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert seen[0][1] == list(range(7))


def test_a_stream_that_was_split_by_node():
    class Config:
        def __init__(self, rank, world_size):
            self.rank, self.world_size = rank, world_size

    def make(rank, ranks):
        stream = Stream(range(rank * 4, rank * 4 + 4))
        stream._distributed = Config(rank, ranks)
        return DataLoader(stream, 2)

    assert [batches for batches, _ in passed_through(make)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_a_distributed_sampler_over_a_part_of_a_data_set(size):
    def make(rank, ranks):
        part = Subset(range(20), range(size))
        return DataLoader(part, 2, sampler=DistributedSampler(part, ranks, rank, shuffle=False))

    assert sorted(passed_through(make)[0][1]) == list(range(size))


def test_another_number_of_ranks_is_said(caplog):
    loader = DataLoader(range(8), 2, sampler=DistributedSampler(range(8), 4, 1, shuffle=False))
    made = prepare_data_loader(loader, num_processes=2, process_index=0)
    assert [batch.tolist() for batch in made] == [[1, 5]]
    assert "split over 4 ranks already, but there are 2" in caplog.text


@pytest.mark.parametrize("what", ["stream", "sampler"])
def test_rank_0_does_not_read_its_own_part_for_all(what):
    def loader(rank, ranks):
        if what == "stream":
            return DataLoader(IterableDatasetShard(Stream(range(8)), 2, False, ranks, rank), 2)
        return DataLoader(range(8), 2, sampler=DistributedSampler(range(8), ranks, rank, shuffle=False))

    def work():
        world = current_world()
        given = loader(world.rank, world.size)
        by_itself = prepare_data_loader(given, device=torch.device("cpu"), put_on_device=True)
        with pytest.raises(ValueError, match="split over 2 ranks already, so the other parts would be lost"):
            prepare_data_loader(given, device=torch.device("cpu"), put_on_device=True, dispatch_batches=True)
        return [number for batch in by_itself for number in batch.tolist()]

    first, second = run_threads(2, work)
    assert sorted(first + second) == list(range(8))
