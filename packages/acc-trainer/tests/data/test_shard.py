"""Sharding against a plain reference: who gets which indices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from acc_trainer.data.shard import BatchSamplerShard, IndexShard, IterableDatasetShard, Repeated, Tail


def batches_of(size: int, batch: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch, drop_last)


def shards(sampler, ranks: int, split: bool, even: bool) -> list[BatchSamplerShard]:
    return [BatchSamplerShard(sampler, ranks, rank, split, even) for rank in range(ranks)]


@given(
    size=st.integers(0, 40),
    share=st.integers(1, 5),
    ranks=st.integers(1, 4),
    split=st.booleans(),
    drop_last=st.booleans(),
    even=st.booleans(),
)
def test_every_sample_once_where_it_must_be(size, share, ranks, split, drop_last, even):
    batch = share * ranks if split else share
    made = shards(batches_of(size, batch, drop_last), ranks, split, even)
    per_rank = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(batches) for batches in per_rank]
    steps = itertools.zip_longest(*per_rank, fillvalue=[])
    group = batch if split else batch * ranks  # samples of one step
    samples = range(size // group * group) if drop_last else range(size)
    seen: list[int] = []
    for step, parts in enumerate(steps):
        wanted = list(samples[step * group : (step + 1) * group])
        joined = [index for part in parts for index in part]
        seen += joined[: len(wanted)]
        filling = joined[len(wanted) :]
        assert not filling or (even and not drop_last)
        # what fills up comes from the start of the epoch, in order, cycling
        cycle = itertools.cycle(samples[:group])
        assert filling == list(itertools.islice(cycle, len(filling)))
        if even:
            assert {len(part) for part in parts} == {share}
    assert seen == list(samples)


@given(
    size=st.integers(1, 40),
    share=st.integers(1, 5),
    ranks=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
)
def test_the_tail_says_how_many_rows_of_each_rank_are_samples(size, share, ranks, split, even):
    batch = share * ranks if split else share
    group = batch if split else batch * ranks
    made = shards(batches_of(size, batch, False), ranks, split, even)
    given_out = [list(shard) for shard in made]
    steps = -(-size // group)
    last = [batches[-1] if len(batches) == steps else [] for batches in given_out]
    for shard, batches in zip(made, given_out, strict=True):
        tails = [shard.tail_of(number) for number in range(1, len(batches) + 1)]
        if size % group == 0 or len(batches) < steps:  # a rank that ends earlier has whole groups only
            assert not any(tails)
            continue
        *before, tail = tails
        assert not any(before)
        assert sum(tail.real) == size % group
        assert list(tail.sizes) == [len(part) for part in last]
        assert all(real <= rows for real, rows in zip(tail.real, tail.sizes, strict=True))


@pytest.mark.parametrize("even", [True, False])
def test_a_short_batch_in_the_middle_leaves_no_rank_without_rows(even):
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8]]

    class Bucketed:
        batch_size, drop_last = 3, False

        def __iter__(self):
            return iter(batches)

    made = shards(Bucketed(), 3, True, even)
    assert [list(shard) for shard in made] == [
        [[0], [3], [4], [6]],
        [[1], [0], [5], [7]],
        [[2], [1], [0], [8]],
    ]
    for shard in made:
        tails = [shard.tail_of(number) for number in (1, 2, 3, 4)]
        assert [None if tail is None else tail.real for tail in tails] == [None, (1, 0, 0), (1, 1, 0), None]
    assert batches == [[0, 1, 2], [3], [4, 5], [6, 7, 8]]


def test_a_tail_of_an_earlier_pass_is_forgotten():
    class Growing:
        batch_size, drop_last, size = 2, False, 3

        def __iter__(self):
            return iter([[0, 1], [2], [3, 4], [5, 6]][: self.size - 1])

    sampler = Growing()
    (shard, _) = shards(sampler, 2, False, True)
    assert (list(shard), shard.tail_of(1)) == ([[0, 1]], Tail(real=(2, 1), sizes=(2, 2)))
    sampler.size = 5
    assert (list(shard), shard.tail_of(1)) == ([[0, 1], [3, 4]], None)


def test_a_known_example():
    made = shards(batches_of(11, 2, False), 2, False, True)
    assert [list(shard) for shard in made] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10, 0]],
    ]


def test_batches_that_the_user_stored_are_not_changed():
    stored = [[0, 1], [2]]
    made = shards(stored, 3, False, True)
    assert [list(shard) for shard in made] == [[[0, 1]], [[2]], [[0]]]
    assert stored == [[0, 1], [2]]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [list, iter, tuple, torch.tensor, set])
def test_batches_may_be_anything_that_yields_indices(kind, split):
    class Yielding:
        batch_size, drop_last = 2, False

        def __iter__(self):
            return (kind(batch) for batch in ([0, 1], [2, 3], [4]))

    seen = [[[int(i) for i in batch] for batch in shard] for shard in shards(Yielding(), 2, split, True)]
    assert seen == ([[[0], [2], [4]], [[1], [3], [0]]] if split else [[[0, 1], [4, 0]], [[2, 3], [1, 2]]])


def test_short_batches_in_the_middle_are_no_tail():
    class Buckets(list):
        batch_size = 3

    made = shards(Buckets([[0, 1, 2], [3], [4, 5, 6], [7, 8, 9], [10, 11]]), 2, False, True)
    assert [list(shard) for shard in made] == [
        [[0, 1, 2], [4, 5, 6], [10, 11, 0]],
        [[3], [7, 8, 9], [1, 2, 3]],
    ]


def test_a_sampler_without_end_is_not_exhausted():
    class Endless:
        batch_size = 2

        def __iter__(self):
            return ([2 * i, 2 * i + 1] for i in itertools.count())

    shard = BatchSamplerShard(Endless(), 2, 1)
    assert list(itertools.islice(shard, 2)) == [[2, 3], [6, 7]]


def test_splitting_needs_a_batch_size_that_divides():
    with pytest.raises(ValueError, match="multiple of the 3 processes, got 4"):
        BatchSamplerShard(batches_of(8, 4, False), 3, 0, split_batches=True)
    with pytest.raises(ValueError, match="got None"):
        BatchSamplerShard([[0]], 2, 0, split_batches=True)


def test_a_rank_must_exist():
    with pytest.raises(ValueError, match=r"0\.\.1, got 2"):
        BatchSamplerShard([[0]], 2, 2)


@given(size=st.integers(1, 20), ranks=st.integers(1, 4), even=st.booleans())
def test_single_indices_go_in_turn(size, ranks, even):
    made = [IndexShard(SequentialSampler(range(size)), ranks, rank, even) for rank in range(ranks)]
    parts = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(part) for part in parts]
    for rank, part in enumerate(parts):
        own = list(range(rank, size, ranks))
        assert part[: len(own)] == own
        assert len(part) == (-(-size // ranks) if even else len(own))


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


@given(
    size=st.integers(0, 40),
    share=st.integers(1, 5),
    ranks=st.integers(1, 4),
    split=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_stream_is_shared_like_batches(size, share, ranks, split, drop_last):
    batch = share * ranks if split else share
    made = [IterableDatasetShard(Stream(size), batch, drop_last, ranks, rank, split) for rank in range(ranks)]
    parts = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(part) for part in parts]
    assert len({len(part) for part in parts}) == 1
    group = share * ranks
    samples = list(range(size // group * group if drop_last else size))
    steps = [part[at : at + share] for at in range(0, len(parts[0]), share) for part in parts]
    joined = list(itertools.chain.from_iterable(steps))
    assert joined[: len(samples)] == samples
    assert joined[len(samples) :] == list(
        itertools.islice(itertools.cycle(samples[:group]), len(joined) - len(samples))
    )


def test_the_last_group_of_a_stream_is_marked_on_every_rank():
    made = [IterableDatasetShard(Stream(5), 2, False, 2, rank) for rank in range(2)]
    for shard in made:
        shard.marks = True
    first, second = ([one for one in shard if isinstance(one, Repeated)] for shard in made)
    assert [one.element for one in first] == [4, 0]
    assert [one.element for one in second] == [1, 2]
    assert first[0].tail.real == (1, 0)


def test_a_stream_with_a_generator_is_seeded_with_the_epoch():
    class Shuffled(IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(6, generator=self.generator).tolist())

    shard = IterableDatasetShard(Shuffled(), 3, num_processes=2, process_index=0)
    first = list(shard)
    assert list(shard) == first
    shard.set_epoch(1)
    assert list(shard) != first


def test_a_stream_that_wants_to_know_is_told_the_epoch():
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

    shard = IterableDatasetShard(Told(4), 2, num_processes=2)
    shard.set_epoch(7)
    assert shard.dataset.epoch == 7


def test_a_split_stream_needs_a_batch_size_that_divides():
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3"):
        IterableDatasetShard(Stream(4), 3, False, 2, 0, True)
