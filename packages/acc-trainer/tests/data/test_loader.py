"""Prepared loaders: the data law in one place after the other."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing as mp
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from acc_ops.testing import run_threads
from acc_trainer import Accelerator
from acc_trainer.data.batches import mover
from acc_trainer.data.loader import DataLoaderShard
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.data.skipping import SkipDataLoader
from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import GradientState


def prepared(loader, **options):
    made = prepare_data_loader(loader, **options)
    made._grad_sync = GradSync()
    return made


def flat(loader):
    return [int(x) for batch in loader for x in batch]


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def test_one_process_gives_what_a_plain_loop_gives_and_draws_as_it_does():
    torch.manual_seed(3)
    plain = [flat(DataLoader(range(17), 4, shuffle=True)) for _ in range(2)] + [torch.rand(1).item()]
    torch.manual_seed(3)
    loader = prepared(DataLoader(range(17), 4, shuffle=True))
    assert [flat(loader), flat(loader), torch.rand(1).item()] == plain


def test_data_sets_and_models_draw_in_the_order_of_a_plain_loop():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.rand(())

    def drawn(loader):
        return [(batch.tolist(), torch.rand(()).item()) for batch in loader]

    torch.manual_seed(0)
    plain = drawn(DataLoader(Noisy(), 2, shuffle=True))
    torch.manual_seed(0)
    assert drawn(prepared(DataLoader(Noisy(), 2, shuffle=True))) == plain


@pytest.mark.parametrize("loader", [DataLoader(range(7), 2), DataLoader(Stream(7), 2)])
def test_the_last_batch_is_known_when_it_is_handed_out(loader):
    made = prepared(loader)
    assert [(made.end_of_dataloader, made.grad_sync.end_of_loader) for _ in made] == [(False, False)] * 3 + [
        (True, True)
    ]
    assert not made.end_of_dataloader
    assert made.grad_sync.loaders == []


def test_a_stream_that_is_longer_than_it_says_is_read_to_its_end():
    class Liar(Stream):
        def __len__(self):
            return 2

    made = prepared(DataLoader(Liar(6), 2))
    assert len(made) == 1
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        seen = flat(made)
    assert seen == list(range(6))


def test_every_pass_is_an_epoch_whether_it_ends_or_is_left():
    made = prepared(DataLoader(range(8), 2))
    assert made.iteration == 0
    flat(made)
    assert (made.position.epoch, made.position.batches) == (1, 0)
    for _ in made:
        break
    assert (made.position.epoch, made.position.batches) == (1, 1)
    next(iter(made))
    gc.collect()
    assert made.position.epoch == 2
    flat(made)
    assert made.position.epoch == 4


def test_a_loop_that_is_left_closes_its_pass_at_once():
    made = prepared(DataLoader(range(8), 2))
    with pytest.raises(KeyError):
        for _ in made:
            assert made.grad_sync.loaders == [made.position]
            raise KeyError("stop")
    assert made.grad_sync.loaders == []
    assert not made.end_of_dataloader


def test_nested_loops_do_not_disturb_each_other():
    sync = GradSync()
    outer, inner = prepared(DataLoader(range(3), 1)), prepared(DataLoader(range(2), 1))
    outer._grad_sync = inner._grad_sync = sync
    ends = []
    for _ in outer:
        for _ in inner:
            pass
        for _ in inner:
            break
        ends.append(sync.end_of_loader)
    assert ends == [False, False, True]


def test_the_same_loader_can_be_nested_in_itself():
    made = prepared(DataLoader(range(3), 1))
    assert [[int(b) for b in made] for _ in made] == [[0, 1, 2]] * 3


def test_loaders_side_by_side_both_end():
    sync = GradSync()
    one, two = prepared(DataLoader(range(2), 1)), prepared(DataLoader(range(3), 1))
    one._grad_sync = two._grad_sync = sync
    assert [sync.end_of_loader for _ in zip(one, two, strict=False)] == [False, False]


@pytest.mark.parametrize("seeded", [False, True])
def test_loaders_that_are_zipped_draw_as_plain_ones_do(seeded):
    def drawn(make):
        torch.manual_seed(0)
        one, two = (make(DataLoader(range(7), 2, shuffle=True)) for _ in range(2))
        pairs = [[batch.tolist() for batch in pair] for pair in zip(one, two, strict=True)]
        return pairs, torch.rand(()).item()

    if not seeded:
        assert drawn(prepared) == drawn(lambda loader: loader)
    made = prepared(DataLoader(range(40), 40, shuffle=True), use_seedable_sampler=seeded)
    ((first, second),) = zip(made, made, strict=True)  # two passes, so two epochs
    assert first.tolist() != second.tolist()


def test_a_pass_that_is_never_begun_leaves_no_workers_and_no_trace():
    made = prepared(DataLoader(range(6), 2, shuffle=True, num_workers=1), use_seedable_sampler=True)
    order = flat(made)
    made.set_epoch(0)
    passed = iter(made)
    workers = mp.active_children()
    assert made.grad_sync.loaders == []
    del passed
    for worker in workers:
        worker.join(timeout=30)
        assert not worker.is_alive()
    assert flat(made) == order


class Unsized(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(torch.randperm(6).tolist())


def test_data_behind_a_sampler_of_the_users_is_drawn_in_the_order_of_a_plain_loop():
    class Noisy(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return index + torch.rand(())

    def make():
        return DataLoader(Noisy(), 2, sampler=Unsized())

    def drawn(loader, passes=2):
        return [(batch.tolist(), torch.rand(()).item()) for _ in range(passes) for batch in loader]

    torch.manual_seed(0)
    plain = drawn(make())
    torch.manual_seed(0)
    made = prepared(make())
    assert drawn(made) == plain
    assert [made.end_of_dataloader for _ in made] == [False, False, True]

    torch.manual_seed(0)
    made = prepared(make())
    next(iter(made))
    torch.rand(())
    state, now = made.position.state_dict(), torch.get_rng_state()
    made.position.load_state_dict(state)
    torch.manual_seed(5)
    torch.set_rng_state(now)
    assert drawn(skip_first_batches(made, 1), 1) + drawn(made, 1) == plain[1:]


def test_skipping_gives_the_rest_and_the_next_epoch_is_the_next_one():
    def make():
        torch.manual_seed(5)
        return prepared(DataLoader(range(16), 4, shuffle=True), use_seedable_sampler=True)

    made = make()
    epochs = [flat(made) for _ in range(3)]
    again = make()
    assert flat(skip_first_batches(again, 2)) == epochs[0][8:]
    assert flat(again) == epochs[1]
    assert flat(skip_first_batches(again, 4)) == []
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_skipping_loader_counts_from_where_it_starts():
    made = prepared(DataLoader(range(10), 2))
    rest = skip_first_batches(skip_first_batches(made, 1), 2)
    assert [(rest.position.batches, rest.end_of_dataloader) for _ in rest] == [(4, False), (5, True)]
    assert isinstance(rest, DataLoaderShard)


def test_a_plain_loader_stays_plain_when_it_skips():
    rest = skip_first_batches(DataLoader(range(10), 3), 2)
    assert type(rest) is DataLoader
    assert flat(rest) == [6, 7, 8, 9]
    stream = skip_first_batches(DataLoader(Stream(10), 3), 2)
    assert isinstance(stream, SkipDataLoader)
    assert flat(stream) == [6, 7, 8, 9]


def test_a_loader_without_batches_skips_items():
    assert [int(x) for x in skip_first_batches(prepared(DataLoader(range(5), None)), 3)] == [3, 4]


def test_skipping_checks_its_arguments():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        skip_first_batches(DataLoader(range(2)), -1)
    with pytest.raises(TypeError, match="data loader is needed, got list"):
        skip_first_batches([1, 2], 1)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(seeded, generator, at):
    def make():
        own = torch.Generator().manual_seed(11) if generator else None
        return prepared(DataLoader(range(16), 4, shuffle=True, generator=own), use_seedable_sampler=seeded)

    torch.manual_seed(1)
    made = make()
    flat(made)
    passed = iter(made)
    for _ in range(at):
        next(passed)
    state = made.position.state_dict()
    random = torch.get_rng_state()
    wanted = [int(x) for batch in passed for x in batch], flat(made), torch.rand(()).item()

    torch.manual_seed(77)
    resumed = make()
    resumed.position.load_state_dict(state)
    torch.set_rng_state(random)
    rest = flat(skip_first_batches(resumed, at)) if at else flat(resumed)
    assert (rest, flat(resumed), torch.rand(()).item()) == wanted


def test_a_position_saved_during_the_last_batch_goes_on_with_the_next_epoch():
    made = prepared(DataLoader(range(8), 4, shuffle=True), use_seedable_sampler=True)
    for _ in made:
        state = made.position.state_dict()
    following = flat(made)
    for use in (
        lambda loader: flat(loader),
        lambda loader: flat(skip_first_batches(loader, 2)) + flat(loader),
    ):
        again = prepared(DataLoader(range(8), 4, shuffle=True), use_seedable_sampler=True)
        again.position.load_state_dict(copy.deepcopy(state))
        assert again.position.state_dict()["finished"]
        assert use(again) == following


def test_a_position_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"\['batches', 'epoch'\] missing"):
        prepared(DataLoader(range(8), 4)).position.load_state_dict({"lr": 1})


def test_set_epoch_chooses_the_order_and_tells_whoever_listens():
    class Told(torch.utils.data.Dataset):
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index

    told = Told()
    made = prepared(DataLoader(told, 2, shuffle=True), use_seedable_sampler=True)
    orders = [flat(made) for _ in range(3)]
    made.set_epoch(1)
    assert flat(made) == orders[1]
    assert flat(made) == orders[2]
    assert told.epochs == [0, 1, 2, 1, 1, 2]


def test_a_loader_class_of_the_users_keeps_its_own_iter_and_attributes():
    class Doubling(DataLoader):
        def __init__(self, *args, colour, **kwargs):
            super().__init__(*args, **kwargs)
            self.colour = colour

        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    def ask():
        made = prepare_data_loader(Doubling(torch.arange(8), batch_size=2, colour="red"))
        assert isinstance(made, Doubling)
        assert made.colour == "red"
        return [b.tolist() for b in made], [b.tolist() for b in skip_first_batches(made, 1)]

    assert run_threads(2, ask) == [
        ([[0, 2], [8, 10]], [[8, 10]]),
        ([[4, 6], [12, 14]], [[12, 14]]),
    ]


def test_the_users_loader_is_left_as_it_was():
    loader = DataLoader(range(8), 2, shuffle=True)
    before = dict(loader.__dict__)
    run_threads(2, lambda: flat(prepare_data_loader(loader)))
    assert loader.__dict__ == before
    assert loader.sampler.generator is None


def test_batches_go_to_the_device():
    made = prepared(DataLoader(torch.arange(4), 2), device=torch.device("meta"), put_on_device=True)
    assert {batch.device.type for batch in made} == {"meta"}
    assert {batch.device.type for batch in prepared(DataLoader(torch.arange(4), 2))} == {"cpu"}


def test_what_is_on_the_cpu_is_handed_on_as_it_is_and_the_rest_is_moved():
    stay = mover(torch.device("cpu"), False)
    here = torch.ones(1)
    for batch in (here, [here, here], (here,), {"a": here}, [], {"a": [here]}, ["a"], 3):
        assert stay(batch) is batch
    away = mover(torch.device("meta"), False)
    assert away(here).device.type == "meta"
    assert away({"a": [here], "b": "text"})["a"][0].device.type == "meta"
    assert mover(None, False) is None


def test_it_passes_for_a_loader():
    made = prepared(DataLoader(range(10), 3))
    assert isinstance(made, DataLoader)
    assert (len(made), made.batch_size, made.total_batch_size, made.total_dataset_length) == (4, 3, 3, 10)
    assert prepare_data_loader(made) is made
    with pytest.raises(AttributeError):
        made.nothing_of_this_name


def test_it_can_be_pickled_and_copied_with_its_position():
    made = prepared(DataLoader(list(range(10)), 2, shuffle=True), use_seedable_sampler=True)
    flat(made)
    twins = [pickle.loads(pickle.dumps(made)), copy.deepcopy(made)]
    second = flat(made)
    assert [twin.position.epoch for twin in twins] == [1, 1]
    assert [flat(twin) for twin in twins] == [second, second]


def test_it_can_be_built_by_hand():
    made = DataLoaderShard(
        list(range(6)), device=torch.device("cpu"), batch_size=2, shuffle=False, iteration=4
    )
    assert (flat(made), made.iteration) == (list(range(6)), 5)
    skipping = DataLoaderShard(list(range(6)), batch_size=2, skip_batches=1)
    assert flat(skipping) == [2, 3, 4, 5]
    GradientState._reset_state()


def test_another_sampler_can_be_put_in():
    made = prepared(DataLoader(range(6), 2))
    made.set_sampler(SequentialSampler([5, 4]))
    assert flat(made) == [0, 1]
    assert isinstance(made.get_sampler(), SequentialSampler)


def test_workers_give_the_same_batches():
    def ask():
        made = prepare_data_loader(DataLoader(list(range(10)), 2, num_workers=1))
        return flat(made), flat(skip_first_batches(made, 1))

    assert ask() == (list(range(10)), list(range(2, 10)))


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(12)), torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)]
)
def test_all_ranks_draw_one_order_and_it_changes_with_the_epoch(sampler):
    def ask():
        made = prepare_data_loader(DataLoader(list(range(12)), 2, sampler=sampler))
        return [[b.tolist() for b in made] for _ in range(2)]

    first, second = run_threads(2, ask)
    for epoch in range(2):
        joined = [
            x for pair in zip(first[epoch], second[epoch], strict=True) for batch in pair for x in batch
        ]
        if isinstance(sampler, RandomSampler):
            assert sorted(joined) == list(range(12))
    assert first[0] != first[1]


def test_ranks_resume_in_the_middle_of_an_epoch():
    def make():
        accelerator = Accelerator()
        return accelerator.prepare(DataLoader(list(range(24)), 2, shuffle=True))

    def uninterrupted():
        made = make()
        flat(made)
        passed = iter(made)
        next(passed)
        state = made.position.state_dict()
        return state, [int(x) for batch in passed for x in batch], flat(made)

    before = run_threads(2, uninterrupted)

    def resumed():
        torch.manual_seed(1234)  # another seed is drawn at prepare, but the saved one counts
        made = make()
        made.position.load_state_dict(before[made.world.rank][0])
        return flat(skip_first_batches(made, 1)), flat(made)

    assert run_threads(2, resumed) == [(rest, following) for _, rest, following in before]


def test_a_distributed_sampler_is_used_and_not_split_again():
    def ask():
        from acc_ops.world import current_world

        world = current_world()
        sampler = torch.utils.data.DistributedSampler(range(7), world.size, world.rank, shuffle=False)
        made = prepare_data_loader(DataLoader(list(range(7)), 2, sampler=sampler))
        seen = []
        for batch in made:
            rows = made.position.real[world.rank] if made.position.real else len(batch)
            seen += batch[:rows].tolist()
        return seen

    assert sorted(itertools.chain.from_iterable(run_threads(2, ask))) == list(range(7))


def test_a_batch_sampler_without_batching_is_split_by_batches():
    class Rows(torch.utils.data.Dataset):
        def __getitem__(self, indices):
            return torch.tensor(indices)

    def ask():
        sampler = BatchSampler(SequentialSampler(range(10)), 2, False)
        return [b.tolist() for b in prepare_data_loader(DataLoader(Rows(), batch_size=None, sampler=sampler))]

    assert run_threads(2, ask) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]


def test_the_share_can_be_asked_for_by_number():
    made = [
        flat(prepare_data_loader(DataLoader(range(8), 2), num_processes=2, process_index=index))
        for index in range(2)
    ]
    assert made == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_wrong_arguments_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="needs put_on_device=True"):
        prepare_data_loader(DataLoader(range(4)), dispatch_batches=True)
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3"):
        prepare_data_loader(DataLoader(range(4), 3), num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ValueError, match=r"0\.\.1, got 5"):
        prepare_data_loader(DataLoader(range(4), 3), num_processes=2, process_index=5)
    with pytest.raises(TypeError, match="DataLoader is needed, got list"):
        prepare_data_loader([1])


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", ["shard", "dispatch", "stream"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_length_of_a_loader_without_its_first_batches_is_that_of_what_is_left(kind, ranks, split):
    class Sized(Stream):
        def __len__(self):
            return self.size

    def work():
        loader = DataLoader(Sized(40) if kind == "stream" else range(40), 4)
        options = {"put_on_device": kind == "dispatch", "dispatch_batches": kind == "dispatch"}
        made = prepared(loader, split_batches=split, **options)
        whole = len(made)
        for count in (0, 2, 100):
            rest = skip_first_batches(made, count)
            assert len(rest) == max(0, whole - count) == sum(1 for _ in rest)
            assert len(made) == whole
        return True

    assert run_threads(ranks, work) == [True] * ranks
