"""Preparing a loader: nothing of the user's is lost."""

from __future__ import annotations

import copy
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync
from acc_trainer.metrics import gather_for_metrics


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Tripling(DataLoader):
    """A loader with a pass of its own."""

    def __iter__(self):
        for batch in super().__iter__():
            yield 3 * batch


def prepared(loader, **options):
    made = prepare_data_loader(loader, **options)
    made._grad_sync = GradSync()
    return made


def rows(loader):
    return [batch.tolist() for batch in loader]


def test_an_iter_of_the_users_over_a_stream_gets_plain_batches_on_every_rank():
    def work():
        world = current_world()
        made = prepared(Tripling(Stream(5), batch_size=2))
        seen, gathered = [], []
        for batch in made:
            seen.append(batch.tolist())
            gathered += gather_for_metrics(batch, made.grad_sync, world).tolist()
        return seen, gathered

    once = [0, 3, 6, 9, 12]
    assert run_threads(2, work) == [([[0, 3], [12, 0]], once), ([[6, 9], [3, 6]], once)]


def test_an_iter_of_the_users_with_workers_over_a_stream_says_what_it_cannot_know(caplog):
    prepare_data_loader(Tripling(Stream(5), batch_size=2, num_workers=1), num_processes=2, process_index=0)
    assert "Tripling has an __iter__ of its own and workers" in caplog.text


class LeavingOut(DataLoader):
    def _get_iterator(self):
        batches = super()._get_iterator()
        next(batches)
        return batches


def test_an_iterator_of_the_users_that_leaves_out_a_batch_lets_no_repeats_into_the_metrics():
    def work():
        loader = prepared(LeavingOut(range(9), 2))
        seen = [(batch.tolist(), loader.end_of_dataloader, loader.position.real) for batch in loader]
        return seen if current_world().rank == 0 else None

    # the batches are [0, 1], [4, 5] and [8, 0]; the last is one sample of this rank and none of the other
    assert run_threads(2, work)[0] == [([4, 5], False, None), ([8, 0], True, (1, 0))]
    assert run_threads(1, work)[0][-1] == ([8], True, None)


def test_a_length_that_a_subclass_tells_loses_no_batch():
    class Modest(DataLoader):
        def __len__(self):
            return 2

    made = prepared(Modest(range(8), 2))
    ends = [(batch.tolist(), made.end_of_dataloader) for batch in made]
    assert ends == [([0, 1], False), ([2, 3], False), ([4, 5], False), ([6, 7], True)]


def test_a_loader_that_skips_can_be_prepared():
    rest = skip_first_batches(DataLoader(Stream(7), 2), 1)

    def work(**options):
        return rows(prepare_data_loader(rest, device=torch.device("cpu"), put_on_device=True, **options))

    assert run_threads(1, work) == [[[2, 3], [4, 5], [6]]]
    assert run_threads(2, work) == [[[2, 3], [6]], [[4, 5], [2]]]
    with pytest.raises(ValueError, match=r"leaves out its first 1 batches.*prepare the loader first"):
        prepare_data_loader(rest, num_processes=2, process_index=0)
    mapped = skip_first_batches(DataLoader(range(7), 2), 1)
    assert run_threads(2, lambda: rows(prepare_data_loader(mapped))) == [[[2, 3], [6, 2]], [[4, 5], [3, 4]]]


def test_workers_keep_what_they_were_given():
    def first_of_worker(worker):
        torch.utils.data.get_worker_info().dataset.first = 100 * (worker + 1)

    class Shifted(Dataset):
        first = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.first + index

    context = multiprocessing.get_context("fork")
    loader = DataLoader(
        Shifted(),
        2,
        num_workers=1,
        worker_init_fn=first_of_worker,
        multiprocessing_context=context,
        prefetch_factor=3,
    )
    made = prepared(loader, num_processes=2, process_index=1)
    assert (made.worker_init_fn, made.multiprocessing_context, made.prefetch_factor) == (
        first_of_worker,
        context,
        3,
    )
    assert rows(made) == [[102, 103]]
    assert Shifted.first == 0


def test_stored_batches_and_dicts_are_handed_on_untouched():
    stored = [{"x": torch.full((2,), float(at)), "name": f"batch {at}"} for at in range(3)]
    made = prepared(DataLoader(stored, batch_size=None, collate_fn=lambda batch: batch))
    got = list(made)
    assert all(one is two for one, two in zip(got, stored, strict=True))

    indices = [[0, 3], [1], [2, 4]]
    run_threads(2, lambda: rows(prepare_data_loader(DataLoader(range(5), batch_sampler=indices))))
    assert indices == [[0, 3], [1], [2, 4]]


def test_batches_of_changing_sizes_are_shared_out_and_counted_once():
    batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8]]

    def work():
        world = current_world()
        made = prepared(DataLoader(range(9), batch_sampler=batches))
        gathered = []
        for batch in made:
            gathered += gather_for_metrics(batch, made.grad_sync, world).tolist()
        return gathered

    assert run_threads(2, work) == [list(range(9))] * 2


def test_an_unsized_sampler_of_single_items_is_shared_out():
    class Endless(torch.utils.data.Sampler):
        def __iter__(self):
            return iter([4, 3, 2, 1, 0])

    def work():
        world = current_world()
        made = prepared(DataLoader(range(5), batch_size=None, sampler=Endless()))
        got = []
        for item in made:
            got += gather_for_metrics(torch.tensor([item]), made.grad_sync, world).tolist()
        return got

    assert run_threads(2, work) == [[4, 3, 2, 1, 0]] * 2


class Listening(Dataset):
    def __init__(self, epoch=0):
        self.epoch = epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return int(self.epoch)


def test_workers_that_stay_and_hear_of_no_epoch_are_told_of_once(caplog):
    made = prepared(DataLoader(Listening(), 2, num_workers=1, persistent_workers=True))
    for _ in range(3):
        rows(made)
    assert caplog.text.count("persistent workers do not hear of epoch 1: Listening.set_epoch") == 1


def test_a_data_set_that_shares_its_epoch_is_heard_by_workers_that_stay(caplog):
    class Shared(Listening):
        def __init__(self):
            self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

        def set_epoch(self, epoch):
            self.epoch.fill_(epoch)

    made = prepared(DataLoader(Shared(), 2, num_workers=1, persistent_workers=True))
    assert [rows(made) for _ in range(3)] == [[[0, 0]], [[1, 1]], [[2, 2]]]
    assert "do not hear" not in caplog.text


def test_ranks_that_split_the_model_get_the_same_data_in_the_same_order(mesh):
    def work():
        return rows(prepare_data_loader(DataLoader(range(8), 2, shuffle=True), torch_device_mesh=mesh))

    one, two, three, four = run_threads(4, work)
    assert one == two
    assert three == four
    assert sorted(number for batches in (one, three) for batch in batches for number in batch) == list(
        range(8)
    )

    def unseeded():
        torch.manual_seed(current_world().rank)
        other = copy.copy(mesh)
        other.mesh_dim_names = ("tp", "cp")
        return rows(prepare_data_loader(DataLoader(range(8), 2, shuffle=True), torch_device_mesh=other))

    first, *others = run_threads(4, unseeded)
    assert others == [first] * 3


@pytest.mark.parametrize("split", [True, False])
def test_rank_0_reads_for_ranks_that_share_their_samples(split, mesh):
    def work():
        made = prepare_data_loader(
            DataLoader(range(7), 4 if split else 2),
            device=torch.device("cpu"),
            put_on_device=True,
            dispatch_batches=True,
            split_batches=split,
            torch_device_mesh=mesh,
        )
        seen = [(batch.tolist(), made.position.real, made.position.padding) for batch in made]
        return seen, len(made)

    one, two, three, four = run_threads(4, work)
    assert one == two
    assert three == four
    assert one == ([([0, 1], None, 0), ([4, 5], (2, 1), 0)], 2)
    assert three == ([([2, 3], None, 0), ([6, 0], (2, 1), 1)], 2)


class Shards(IterableDataset):
    """A stream with shards of its own, of unequal length."""

    def __init__(self, *shards):
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards, index):
        return Shards(*self.shards[index::num_shards])

    def __iter__(self):
        return (number for shard in self.shards for number in shard)


def test_shards_of_a_stream_are_shared_and_their_ends_are_told_by_share(mesh):
    def work():
        made = prepare_data_loader(
            DataLoader(Shards([1, 2, 3], [4]), 2), dispatch_batches=False, torch_device_mesh=mesh
        )
        return [(batch.tolist(), made.position.real, made.position.padding) for batch in made]

    one, two, three, four = run_threads(4, work)
    assert one == two == [([1, 2], (2, 1), 0), ([3], (1, 0), 0)]
    assert three == four == [([4], (2, 1), 0), ([4], (1, 0), 1)]


def test_setting_the_saved_epoch_keeps_the_place_in_it():
    def make():
        return prepared(DataLoader(range(12), 2, shuffle=True))

    made = make()
    passed = iter(made)
    next(passed)
    state = made.position.state_dict()
    wanted = rows(passed)
    again = make()
    again.position.load_state_dict(state)
    again.set_epoch(0)
    assert rows(skip_first_batches(again, 1)) == wanted
    again.position.load_state_dict(state)
    again.set_epoch(3)
    assert (again.position.epoch, again.position.batches) == (3, 0)
