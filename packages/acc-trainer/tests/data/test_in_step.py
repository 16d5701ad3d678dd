"""Streams with shards of their own: each rank reads its own alone, and still has as many batches as the others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.in_step import own_shards
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync
from acc_trainer.metrics import gather_for_metrics


class Files(IterableDataset):
    """A stream like those of `datasets`: files that can be shared out, and an epoch that moves the order inside each."""

    def __init__(self, files):
        self.files, self.epoch, self.opened = files, 0, []

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index, contiguous=True):
        assert contiguous
        made = Files(self.files[index::num_shards])
        made.opened = self.opened
        return made

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for file in self.files:
            self.opened.append(file)
            turn = self.epoch % len(file) if file else 0
            yield from [*file[turn:], *file[:turn]]


def files_of(lengths):
    numbers = itertools.count()
    return [[next(numbers) for _ in range(length)] for length in lengths]


def batches_of(files, rank, ranks, size, drop_last, epoch=0):
    """By hand: the batches of one rank's own files."""
    mine = []
    for file in files[rank::ranks]:
        turn = epoch % len(file) if file else 0
        mine += [*file[turn:], *file[:turn]]
    batches = [mine[at : at + size] for at in range(0, len(mine), size)]
    return [batch for batch in batches if len(batch) == size] if drop_last else batches


def prepared(files, size, drop_last, **options):
    made = prepare_data_loader(DataLoader(Files(files), size, drop_last=drop_last), **options)
    made._grad_sync = GradSync()
    return made


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    size=st.integers(1, 3),
    ranks=st.integers(1, 3),
    drop_last=st.booleans(),
    done=st.integers(1, 4),
)
def test_ranks_stay_in_step_and_every_sample_is_seen_once(lengths, size, ranks, drop_last, done):
    files = files_of(lengths)
    if len(files) < ranks:
        files += files_of([3] * (ranks - len(files)))
    own = [
        [batches_of(files, rank, ranks, size, drop_last, epoch) for rank in range(ranks)] for epoch in (0, 1)
    ]
    counts = [len(batches) for batches in own[0]]
    steps = min(counts) if drop_last else max(counts)

    def wanted_of(epoch, rank):
        mine = own[epoch][rank][:steps]
        return mine + [mine[0]] * (steps - len(mine)) if mine else []

    def work():
        world = current_world()
        made = prepared(files, size, drop_last)
        seen, gathered, ends = [], [], []
        for batch in made:
            seen.append(batch.tolist())
            ends.append((made.end_of_dataloader, made.grad_sync.end_of_loader))
            gathered += gather_for_metrics(batch, made.grad_sync, world).tolist()
        assert seen == wanted_of(0, world.rank)
        assert ends == [(at == steps - 1,) * 2 for at in range(steps)]
        once = [row for batches in own[0] for batch in batches[:steps] for row in batch]
        assert sorted(gathered) == sorted(once)

        stop = min(done, steps)
        if stop:
            again = prepared(files, size, drop_last)
            passed = iter(again)
            for _ in range(stop):
                next(passed)
            state = again.position.state_dict()
            passed.close()
            resumed = prepared(files, size, drop_last)
            resumed.position.load_state_dict(state)
            if stop < steps:
                rest = [batch.tolist() for batch in skip_first_batches(resumed, stop)]
                assert rest == wanted_of(0, world.rank)[stop:]
            assert [batch.tolist() for batch in resumed] == wanted_of(1, world.rank)
        return True

    if ranks > 1 and not drop_last and 0 in counts:
        return
    assert all(run_threads(ranks, work))


def test_each_rank_opens_its_own_files_only():
    def work():
        stream = Files(files_of([2, 2, 2, 2]))
        list(prepare_data_loader(DataLoader(stream, 2)))
        return stream.opened

    assert run_threads(2, work) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_split_batches_give_each_rank_its_share_of_a_batch():
    def work():
        return [
            len(batch)
            for batch in prepare_data_loader(DataLoader(Files(files_of([4, 4])), 4), split_batches=True)
        ]

    assert run_threads(2, work) == [[2, 2], [2, 2]]


def test_with_too_few_shards_the_elements_are_shared_out():
    def work():
        return [batch.tolist() for batch in prepare_data_loader(DataLoader(Files(files_of([8])), 2))]

    assert run_threads(2, work) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_uneven_ranks_end_when_they_have_nothing_more():
    def work():
        made = prepare_data_loader(DataLoader(Files(files_of([4, 2])), 2), even_batches=False)
        return [batch.tolist() for batch in made]

    assert run_threads(2, work) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_a_rank_without_any_sample_is_an_error_on_every_rank():
    def work():
        with pytest.raises(RuntimeError, match="rank 1 has shards without a sample"):
            list(prepare_data_loader(DataLoader(Files([[0, 1], []]), 2)))
        return True

    assert all(run_threads(2, work))


def test_items_without_batches_stay_in_step():
    def work():
        return [int(item) for item in prepare_data_loader(DataLoader(Files([[0, 1, 2], [3]]), None))]

    assert run_threads(2, work) == [[0, 1, 2], [3, 3, 3]]


@pytest.mark.parametrize("thing", [object(), [1, 2], Files([[1]])])
def test_what_has_no_shards_for_all_ranks_is_told(thing):
    assert own_shards(thing, 2, 0) is None


def test_pairs_of_texts_are_counted_by_rows():
    def work():
        pairs = Files([[(f"s{i}", f"t{i}") for i in file] for file in files_of([5, 2])])
        made = prepare_data_loader(
            DataLoader(pairs, 3), device=current_world().device, put_on_device=True, dispatch_batches=False
        )
        made._grad_sync = sync = GradSync()
        got = []
        for _, targets in made:
            got += gather_for_metrics(targets, sync, current_world())
        return got

    assert run_threads(2, work) == [["t0", "t1", "t2", "t5", "t6", "t3", "t4"]] * 2
