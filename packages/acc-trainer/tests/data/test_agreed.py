"""Samplers of the user's own on several ranks: each draws for itself, and all use one order."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from acc_ops.exchange import MismatchError
from acc_ops.testing import run_processes, run_threads
from acc_ops.world import current_world
from acc_trainer.data.agreed import _packed, _unpacked
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync


class ByRank(Sampler):
    """Another order on every rank."""

    def __init__(self, size, seed=0):
        self.size, self.draws = size, random.Random(seed + current_world().rank)

    def __iter__(self):
        order = list(range(self.size))
        self.draws.shuffle(order)
        return iter(order)


class Sized(ByRank):
    def __len__(self):
        return self.size


class WithoutEnd(ByRank):
    def __iter__(self):
        while True:
            yield from super().__iter__()


class Batches(ByRank):
    def __iter__(self):
        order = list(super().__iter__())
        return ((index for index in order[i : i + 2]) for i in range(0, self.size, 2))


def prepared(loader):
    made = prepare_data_loader(loader)
    made._grad_sync = GradSync()
    return made


def in_turn(passes):
    """What the ranks saw, joined in the order in which they share it out."""
    return [one for group in itertools.zip_longest(*passes) for batch in group for one in batch]


class Tensors(Sized):
    def __iter__(self):
        return iter(torch.tensor(list(super().__iter__())))


KINDS = {
    "tensors": lambda: DataLoader(range(200), 5, sampler=Tensors(200)),
    "sized": lambda: DataLoader(range(200), 5, sampler=Sized(200)),
    "unsized": lambda: DataLoader(range(200), 5, sampler=ByRank(200)),
    "batches": lambda: DataLoader(range(200), batch_sampler=Batches(200)),
    "stored": lambda: DataLoader(range(200), batch_sampler=[list(b) for b in Batches(200)]),
    "items": lambda: DataLoader(range(200), None, sampler=ByRank(200)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_comes_once_though_each_rank_draws_another_order(kind):
    def work():
        loader = prepared(KINDS[kind]())
        return [[torch.as_tensor(batch).reshape(-1).tolist() for batch in loader] for _ in range(2)]

    first, second = zip(*run_threads(2, work), strict=True)
    assert sorted(in_turn(first)) == sorted(in_turn(second)) == list(range(200))
    assert (first == second) == (kind == "stored")


def test_indices_that_are_tensors_stay_tensors_and_are_sent_without_their_storage():
    order = torch.arange(1000)
    packed = _packed([list(order[:2]), order[2:4], 5])
    assert len(pickle.dumps(packed)) < 1000
    (first, second), pair, plain = _unpacked(packed)
    assert (first.item(), second.item(), pair.tolist(), plain) == (0, 1, [2, 3], 5)
    assert first.dtype == pair.dtype == torch.int64


def test_a_sampler_without_end_is_agreed_on_piece_by_piece():
    def work():
        loader = prepared(DataLoader(range(50), 5, sampler=WithoutEnd(50)))
        return [batch.tolist() for batch in itertools.islice(loader, 100)]

    order = in_turn(run_threads(2, work))
    for start in range(0, len(order), 50):
        assert sorted(order[start : start + 50]) == list(range(50))


def test_a_sampler_that_fails_on_one_rank_is_told_to_all():
    class Failing(Sized):
        def __iter__(self):
            if current_world().rank == 1:
                raise KeyError("no such index")
            return super().__iter__()

    def work():
        with pytest.raises(MismatchError, match=r"rank 1 cannot take part: KeyError: 'no such index'"):
            list(prepared(DataLoader(range(8), 2, sampler=Failing(8))))
        return True

    assert run_threads(2, work) == [True, True]


class Derived(RandomSampler):
    pass


class Drawing(Sampler):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


class Shuffling(Drawing):
    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        return iter(order)


def resumed_and_not(rank_seed=100):
    """Two passes of each sampler, and the end of the first and the second once more after a resume, where ranks were seeded differently."""
    told = {}
    for kind in (Derived, Drawing, Shuffling):
        torch.manual_seed(rank_seed + current_world().rank)
        random.seed(rank_seed + current_world().rank)

        def make(kind=kind):
            sampler = kind(range(14)) if kind is Derived else kind(14)
            return prepared(DataLoader(range(14), batch_sampler=BatchSampler(sampler, 2, False)))

        loader = make()
        passed = iter(loader)
        start = [next(passed).tolist() for _ in range(2)]
        state = loader.position.state_dict()
        then = torch.get_rng_state(), random.getstate()
        rest, second = [b.tolist() for b in passed], [b.tolist() for b in loader]
        torch.manual_seed(7)
        again = make()
        again.position.load_state_dict(state)
        torch.set_rng_state(then[0])
        random.setstate(then[1])
        repeated = [b.tolist() for b in skip_first_batches(again, 2)], [b.tolist() for b in again]
        told[kind.__name__] = (start + rest, second, repeated == (rest, second))
    return told


def test_ranks_that_nobody_seeded_share_one_order_also_after_a_resume():
    ranks = run_processes(2, resumed_and_not)
    for kind in ranks[0]:
        firsts, seconds, alike = zip(*(told[kind] for told in ranks), strict=True)
        assert sorted(set(in_turn(firsts))) == sorted(set(in_turn(seconds))) == list(range(14)), kind
        assert firsts != seconds, kind
        assert all(alike), kind
