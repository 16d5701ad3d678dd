"""A stateful loader that is told something past the prepared one in front of it: given a state, or asked for its own."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader
from acc_trainer.grad_sync import GradSync

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore")
ELEVEN = list(range(11))


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


class Late(IterableDataset):
    """A stream that takes and tells a state only when it is read, as those of `datasets` do."""

    def __init__(self):
        self.at = self.begin = 0

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < 11:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"] % 11


def flat(loader):
    return [int(x) for batch in loader for x in batch]


def over(loader, **options):
    made = prepare_data_loader(loader, use_stateful_dataloader=True, **options)
    made._grad_sync = GradSync()
    return made


def dispatched(loader):
    return over(loader, dispatch_batches=True, put_on_device=True, device=torch.device("cpu"))


def raw(data, state=None, **options):
    """torchdata's own loader, which was given a state."""
    made = StatefulDataLoader(data() if isinstance(data, type) else data, 2, **options)
    if state is not None:
        made.load_state_dict(copy.deepcopy(state))
    return made


def raw_state(data, count, **options):
    """The state of such a loader behind so many batches."""
    loader = raw(data, **options)
    for _ in itertools.islice(loader, count):
        pass
    return loader.state_dict()


def resumed(made, state):
    made.position.load_state_dict(copy.deepcopy(state))
    return made


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [ELEVEN, Stream, Counting, Late])
@pytest.mark.parametrize("where", ["before", "below", "used"])
def test_a_state_that_was_given_past_the_prepared_loader_counts(asked, workers, data, where):
    state = raw_state(data, 2, num_workers=workers)

    def make():
        loader = raw(data, state if where == "before" else None, num_workers=workers)
        if where == "before" and asked:
            loader.state_dict()
        made = over(loader)
        if where == "used":
            next(iter(made))
        if where != "before":
            made.base_dataloader.load_state_dict(copy.deepcopy(state))
            if asked:
                made.base_dataloader.state_dict()
        return made

    made, batches, states = make(), [], []
    if where == "before" and not asked:  # a run that saves before it reads
        made = resumed(over(raw(data, num_workers=workers)), made.position.state_dict())
    for batch in made:
        batches.append((batch.tolist(), made.position.batches, made.end_of_dataloader))
        states.append(copy.deepcopy(made.position.state_dict()))
    if asked and data is Stream:  # torchdata has fast-forwarded it, and counts that twice
        batches, states = [(batch, number - 2, is_last) for batch, number, is_last in batches], []
    assert batches == [([4, 5], 3, False), ([6, 7], 4, False), ([8, 9], 5, False), ([10], 6, True)]
    assert flat(made) == ELEVEN
    for at, state_there in enumerate(states[:-1], start=3):
        assert flat(resumed(over(raw(data, num_workers=workers)), state_there)) == ELEVEN[2 * at :]


@pytest.mark.parametrize("data", [ELEVEN, Stream, Counting])
@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("below", [False, True])
def test_a_state_that_was_given_to_a_loader_that_rank_0_reads_counts_in_its_batches(data, all_ranks, below):
    state = raw_state(data, 3)

    def work():
        given = state if all_ranks or current_world().is_main else None
        made = dispatched(raw(data, None if below else given))
        if below and given is not None:
            made.base_dataloader.load_state_dict(copy.deepcopy(given))
        return [[(batch.tolist(), made.end_of_dataloader) for batch in made] for _ in range(3)]

    first, second = run_threads(2, work)
    assert (first[0][0], second[0][0]) == (([6, 7], False), ([8, 9], False))
    (last, is_last), *more = first[0][1:]
    assert (last[0], is_last, more) == (10, True, [])
    for passes in zip(first[1:], second[1:], strict=True):
        assert {one for of_rank in passes for rows, _ in of_rank for one in rows} == set(ELEVEN)


@pytest.mark.parametrize("data", [list(range(12)), Stream])
def test_a_state_of_all_batches_is_refused_where_each_process_gets_its_share_of_them(data):
    state = raw_state(data, 2)

    def work():
        with pytest.raises(
            ValueError, match=r"was given a state before it was prepared.*prepared\.load_state_dict"
        ):
            over(raw(data, state), dispatch_batches=False)
        return True

    assert run_threads(2, work) == [True, True]


def test_a_state_behind_all_batches_is_followed_by_whole_epochs():
    iterator = iter(loader := raw(range(12)))
    for _ in range(6):
        next(iterator)
    made = over(raw(range(12), loader.state_dict()))
    assert [len(list(made)) for _ in range(3)] == [0, 6, 6]
    assert [len(list(over(raw(range(12), raw_state(range(12), 9))))) for _ in range(2)] == [6, 6]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("data", [list(range(12)), Stream, Counting, Late])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_who_asks_the_loader_below_for_its_state_changes_no_pass(options, data, ranks, dispatch):
    def work():
        loader = raw(data, **options)
        loader.state_dict()
        made = dispatched(loader) if dispatch else over(loader, dispatch_batches=False)
        got = []
        for _ in range(2):
            made.base_dataloader.state_dict()
            got.append(flat(made))
            made.base_dataloader.state_dict()
        state = copy.deepcopy(made.position.state_dict())
        made.position.load_state_dict(state)
        made.base_dataloader.state_dict()
        got.append(flat(made))
        assert got == got[:1] * 3
        return got[0]

    got = run_threads(ranks if not options else 1, work)
    assert set(itertools.chain(*got)) == set(range(12 if isinstance(data, list) else 11))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_has_its_own_order_though_the_loader_below_was_asked_in_another(workers):
    def make():
        return over(
            DataLoader(range(40), 2, shuffle=True, num_workers=workers),
            use_seedable_sampler=True,
            data_seed=3,
        )

    made = make()
    wanted = flat(made), flat(made)
    made = make()
    made.base_dataloader.state_dict()
    made.set_epoch(1)
    assert flat(made) == wanted[1]
    made = make()
    flat(made)
    for _ in itertools.islice(made, 5):
        state = copy.deepcopy(made.position.state_dict())
    made = resumed(make(), state)
    made.base_dataloader.state_dict()
    assert flat(made) == wanted[1][10:]
