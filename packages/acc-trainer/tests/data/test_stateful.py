"""Loaders over torchdata's StatefulDataLoader continue by themselves."""

from __future__ import annotations

import copy
import importlib.util
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.random import capture_rng, restore_rng, set_seed
from acc_ops.testing import run_threads
from acc_trainer.data.loader import DataLoaderShard
from acc_trainer.data.prepare import prepare_data_loader, rest_of_epoch, skip_first_batches
from acc_trainer.grad_sync import GradSync

has_torchdata = importlib.util.find_spec("torchdata") is not None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


class Counter:
    """What reads a stream, and has a state of its own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 11:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Counting(IterableDataset):
    def __iter__(self):
        return Counter()


def flat(loader):
    return [int(x) for batch in loader for x in batch]


@pytest.mark.skipif(has_torchdata, reason="torchdata is installed")
def test_without_torchdata_it_says_what_to_install():
    with pytest.raises(ImportError, match="torchdata"):
        prepare_data_loader(DataLoader(range(4)), use_stateful_dataloader=True)


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [list(range(12)), Stream()])
@pytest.mark.parametrize("seeded", [False, True])
def test_it_goes_on_where_it_was_saved_and_then_with_the_next_epoch(data, seeded):
    def make(seed):
        torch.manual_seed(seed)
        loader = DataLoader(data, 2, shuffle=None if isinstance(data, Stream) else True)
        made = prepare_data_loader(loader, use_stateful_dataloader=True, use_seedable_sampler=seeded)
        made._grad_sync = GradSync()
        return made

    made = make(1)
    flat(made)
    passed = iter(made)
    next(passed)
    state = made.position.state_dict()
    wanted = [int(x) for batch in passed for x in batch], flat(made)
    again = make(2)
    again.position.load_state_dict(state)
    assert (flat(again), flat(again)) == wanted


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [list(range(12)), Stream()])
@pytest.mark.parametrize("workers", [0, 1])
def test_its_own_state_is_enough_to_go_on_with(data, workers):
    def make():
        made = prepare_data_loader(DataLoader(data, 2, num_workers=workers), use_stateful_dataloader=True)
        made._grad_sync = GradSync()
        return made

    made = make()
    for at, _ in enumerate(made, start=1):
        state = made.state_dict()
        again = make()
        again.load_state_dict(state)
        again.set_epoch(made.iteration)
        ends = [(batch.tolist(), again.end_of_dataloader, again.position.batches) for batch in again]
        begin = at if at < 6 else 0  # at the end of an epoch the next one follows
        assert ends == [
            (list(range(2 * n, min(2 * n + 2, 12 if isinstance(data, list) else 11))), n == 5, n + 1)
            for n in range(begin, 6)
        ]
        assert bool(state["_iterator_finished"]) == (at == 6)


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
def test_a_subclass_can_correct_the_state_that_was_taken():
    class Noting(DataLoaderShard):
        def adjust_state_dict_for_prefetch(self):
            self.dl_state_dict["mine"] = self.position.batches

    made = Noting(Stream(), use_stateful_dataloader=True, batch_size=2)
    made._grad_sync = GradSync()
    assert [made.state_dict()["mine"] for _ in made] == list(range(6))


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_reads_nothing_has_nothing_to_save():
    def work():
        made = prepare_data_loader(
            DataLoader(Stream(), 2),
            device=torch.device("cpu"),
            put_on_device=True,
            dispatch_batches=True,
            use_stateful_dataloader=True,
        )
        made._grad_sync = GradSync()
        return [bool(made.state_dict()) for _ in made]

    assert run_threads(2, work) == [[True] * 3, [False] * 3]


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [list(range(22)), Stream()])
@pytest.mark.parametrize("workers", [0, 1])
def test_it_goes_on_after_one_resume_after_another(data, workers):
    def make():
        made = prepare_data_loader(DataLoader(data, 2, num_workers=workers), use_stateful_dataloader=True)
        made._grad_sync = GradSync()
        return made

    got, state = [], None
    for steps in (2, 1, 1, 99):
        made = make()
        if state is not None:
            made.position.load_state_dict(state)
            state = made.position.state_dict()  # a run that saves before it reads
            made = make()
            made.position.load_state_dict(state)
        for at, batch in enumerate(made, start=1):
            got += batch.tolist()
            if at == steps:
                state = made.position.state_dict()
                break
    assert got == list(range(11 if isinstance(data, Stream) else 22))


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [list(range(11)), Stream()])
@pytest.mark.parametrize("resumes", [1, 2])
def test_a_dispatched_tail_is_filled_from_the_beginning_of_the_epoch_after_a_resume_too(data, resumes):
    def work():
        def make():
            made = prepare_data_loader(
                DataLoader(data, 2),
                device=torch.device("cpu"),
                put_on_device=True,
                dispatch_batches=True,
                use_stateful_dataloader=True,
            )
            made._grad_sync = GradSync()
            return made

        wanted = [batch.tolist() for batch in make()]
        made, got = make(), []
        for _ in range(resumes):
            passed = iter(made)
            got.append(next(passed).tolist())
            state = made.position.state_dict()
            passed.close()
            made = make()
            made.position.load_state_dict(state)
        got += [batch.tolist() for batch in made]
        assert got == wanted
        return got[-1]

    assert run_threads(2, work)[1][-1] in (0, 1)


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("done", [1, 6, 7, 12])
@pytest.mark.parametrize("data", [list(range(12)), Stream()])
def test_workers_that_stay_draw_what_they_would_have_drawn(data, done):
    def make(seed):
        set_seed(seed)
        shuffle = None if isinstance(data, Stream) else True
        loader = DataLoader(data, 2, shuffle=shuffle, num_workers=1, persistent_workers=True)
        made = prepare_data_loader(loader, use_stateful_dataloader=True)
        made._grad_sync = GradSync()
        return made

    def passes(made, number):
        for _ in range(number):
            for batch in made:
                yield batch.tolist(), torch.rand(1).item()

    made, wanted = make(1), []
    for step in passes(made, 3):
        wanted.append(step)
        if len(wanted) == done:
            state, drawn = made.position.state_dict(), capture_rng()
    again = make(2)
    again.position.load_state_dict(state)
    restore_rng(drawn)
    assert list(passes(again, 3 - done // 6)) == wanted[done:]


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stateful", [True, False])
def test_ranks_that_end_apart_go_on_in_the_same_epoch(stateful):
    def work():
        def make():
            made = prepare_data_loader(
                DataLoader(range(10), 2), even_batches=False, use_stateful_dataloader=stateful
            )
            made._grad_sync = GradSync()
            return made

        made = make()
        passed = iter(made)
        next(passed), next(passed)  # the last one of rank 1, but not of rank 0
        state = made.position.state_dict()
        wanted = [batch.tolist() for batch in passed], [batch.tolist() for batch in made]
        again = make()
        again.position.load_state_dict(state)
        assert again.iteration == 0
        assert ([batch.tolist() for batch in rest_of_epoch(again)], [b.tolist() for b in again]) == wanted
        return wanted[0]

    assert run_threads(2, work) == [[[8, 9]], []]


def dispatched(loader):
    made = prepare_data_loader(
        loader,
        dispatch_batches=True,
        put_on_device=True,
        device=torch.device("cpu"),
        use_stateful_dataloader=True,
    )
    made._grad_sync = GradSync()
    return made


def resumed(made, state):
    made.position.load_state_dict(copy.deepcopy(state))
    return made


def rows(loader):
    return [batch.tolist() for batch in loader]


TWINS = {
    "a twin": lambda loader: skip_first_batches(loader, 2),
    "a twin of a twin": lambda loader: skip_first_batches(skip_first_batches(loader, 1), 1),
}


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("data", [lambda: list(range(11)), Stream, Counting])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_what_is_saved_while_a_loader_without_its_first_batches_is_read_is_where_that_stands(
    twin, data, ranks, used
):
    def make():
        made = dispatched(DataLoader(data(), 1))
        for _ in itertools.islice(made, used):
            pass
        return made

    def work():
        whole = rows(dispatched(DataLoader(data(), 1)))
        made, states = dispatched(DataLoader(data(), 1)), []
        for _ in itertools.islice(made, 2):
            states = [copy.deepcopy(made.position.state_dict())]
        made = resumed(make(), states[0])
        for at, batch in enumerate(TWINS[twin](made), start=2):
            assert batch.tolist() == whole[at]
            states.append(copy.deepcopy(made.position.state_dict()))
        for at, state in enumerate(states[:-1], start=2):
            assert rows(rest_of_epoch(resumed(make(), state))) == whole[at:]
        for state in (states[-1], made.position.state_dict()):  # at the last batch, and behind it
            assert rows(rest_of_epoch(resumed(make(), state))) == whole
        assert rows(made) == whole
        return [one for batch in whole for one in batch]

    assert set(itertools.chain(*run_threads(ranks, work))) == set(range(11))


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
def test_a_twin_that_was_made_before_a_load_goes_on_behind_it():
    made = dispatched(DataLoader(range(12), 2))
    next(iter(made))
    state = copy.deepcopy(made.position.state_dict())
    twin = skip_first_batches(made, 1)
    assert flat(twin) == list(range(2, 12))
    made.position.load_state_dict(state)
    assert flat(twin) == list(range(2, 12))
    assert made.position.state_dict()["loader"]["_iterator_finished"]
    twin.load_state_dict(state["loader"])
    assert made.state_dict() == state["loader"]
    assert flat(made) == list(range(2, 12))


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_dispatching_loader_that_becomes_stateful_in_an_epoch_goes_on_in_it(ranks, stream):
    def lives():
        def make(stateful):
            made = prepare_data_loader(
                DataLoader(Stream() if stream else list(range(11)), 1),
                dispatch_batches=True,
                put_on_device=True,
                device=torch.device("cpu"),
                use_stateful_dataloader=stateful,
            )
            made._grad_sync = GradSync()
            return made

        got, state = [], None
        for stateful, steps in ((False, 1), (True, 0), (True, 1), (True, 1), (False, 99)):
            made = make(stateful) if state is None else resumed(make(stateful), state)
            for batch in itertools.islice(rest_of_epoch(made), steps):
                got += batch[: len(batch) - made.position.padding].tolist()
                state = copy.deepcopy(made.position.state_dict())
            state = copy.deepcopy(made.position.state_dict()) if not steps else state
        return got

    assert sorted(itertools.chain(*run_threads(ranks, lives))) == list(range(11))
