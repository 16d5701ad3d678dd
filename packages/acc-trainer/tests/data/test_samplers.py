"""Samplers that follow from seed and epoch, and samplers that leave batches out."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from acc_trainer.data.samplers import (
    OneAhead,
    ResumedIndices,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_skip,
    get_sampler,
    has_trusted_length,
    is_random,
    seedable,
)
from acc_trainer.data.shard import BatchSamplerShard


def test_the_order_depends_on_seed_and_epoch_only():
    first = SeedableRandomSampler(range(20), data_seed=3)
    epochs = [list(first) for _ in range(3)]
    torch.manual_seed(99)
    again = SeedableRandomSampler(range(20), data_seed=3)
    again.set_epoch(2)
    assert list(again) == epochs[2]
    assert len({tuple(order) for order in epochs}) == 3
    assert first.epoch == 3


def test_the_seed_comes_from_the_generator_when_there_is_one():
    def order(seed):
        return list(SeedableRandomSampler(range(30), generator=torch.Generator().manual_seed(seed)))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_users_generator_is_not_moved():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    list(SeedableRandomSampler(range(8), generator=generator))
    assert torch.equal(generator.get_state(), before)


def test_without_anything_the_seed_is_torchs():
    torch.manual_seed(7)
    one = list(SeedableRandomSampler(range(16)))
    torch.manual_seed(7)
    torch.rand(5)
    assert list(SeedableRandomSampler(range(16))) == one


def test_a_pass_that_is_left_does_not_move_the_epoch():
    sampler = SeedableRandomSampler(range(8), data_seed=0)
    next(iter(sampler))
    assert sampler.epoch == 0


def test_it_can_be_pickled():
    sampler = SeedableRandomSampler(range(8), data_seed=4)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(copy.deepcopy(sampler))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(12)),
        RandomSampler(range(12), replacement=True, num_samples=20),
        SubsetRandomSampler(list(range(12))),
        WeightedRandomSampler([1.0] * 12, 9),
    ],
)
def test_torchs_random_samplers_become_a_function_of_the_epoch(sampler):
    made, told = seedable(sampler, 3)
    orders = []
    for epoch in (0, 1, 0):
        told.set_epoch(epoch)
        orders.append(list(made))
    assert orders[0] == orders[2] != orders[1]
    assert sampler.generator is None


class Derived(RandomSampler):
    pass


@pytest.mark.parametrize("kind", [RandomSampler, Derived])
def test_a_pass_inside_another_does_not_change_its_order(kind):
    made, told = seedable(kind(range(4), num_samples=12), 3)
    told.set_epoch(0)
    alone = list(made)
    told.set_epoch(0)
    outer = iter(made)
    begun = [next(outer) for _ in range(2)]
    told.set_epoch(1)
    assert len(list(made)) == 12
    assert begun + list(outer) == alone


def test_a_sampler_derived_from_torchs_is_seeded_as_that_is():
    class WithoutGenerator(RandomSampler):
        def __init__(self):
            pass

    assert is_random(Derived(range(4)))
    assert not is_random(WithoutGenerator())
    assert not is_random(SeedableRandomSampler(range(4)))


def test_the_end_is_known_with_the_last_indices():
    ahead = OneAhead().over([3, 1, 2])
    assert [(item, ahead.ended) for item in ahead] == [(3, False), (1, False), (2, True)]
    assert (len(ahead), list(OneAhead().over([]))) == (3, [])


def test_skipping_leaves_out_the_first_batches():
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    skipped = SkipBatchSampler(sampler, 2)
    assert list(skipped) == [[6, 7, 8], [9]]
    assert (len(skipped), skipped.total_length) == (2, 4)
    assert list(SkipBatchSampler(sampler, 9)) == []
    assert len(SkipBatchSampler(sampler, 9)) == 0


def test_resumed_indices_draw_when_they_are_primed():
    torch.manual_seed(1)
    whole = list(BatchSampler(RandomSampler(range(10)), 3, False))
    torch.manual_seed(1)
    resumed = ResumedIndices(BatchSampler(RandomSampler(range(10)), 3, False), 2)
    indices = iter(resumed)
    resumed.prime()
    torch.manual_seed(50)
    assert list(indices) == whole[2:]
    assert len(resumed) == 2


@pytest.mark.parametrize("count", [-1, 1.5, "3", True])
def test_a_bad_number_to_skip_is_refused(count):
    with pytest.raises(ValueError, match="at least 0, got"):
        check_skip(count)


def test_only_torchs_own_lengths_are_trusted():
    class Mine(SequentialSampler):
        pass

    plain = BatchSampler(SequentialSampler(range(4)), 2, False)
    assert has_trusted_length(plain)
    assert has_trusted_length(BatchSamplerShard(plain, 2, 0))
    assert has_trusted_length(SkipBatchSampler(BatchSamplerShard(plain, 2, 0), 1))
    assert not has_trusted_length(BatchSampler(Mine(range(4)), 2, False))
    assert not has_trusted_length([[0, 1]])


def test_the_sampler_below_batches_is_found():
    loader = DataLoader(range(4), batch_size=2, shuffle=True)
    assert isinstance(get_sampler(loader), RandomSampler)
    nested = DataLoader(
        range(4), batch_size=None, sampler=BatchSampler(SequentialSampler(range(4)), 2, False)
    )
    assert isinstance(get_sampler(nested), SequentialSampler)
    stored = DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])
    assert get_sampler(stored) == [[0, 1], [2, 3]]
