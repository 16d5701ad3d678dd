"""The rest of an epoch goes to another number of ranks: no sample is lost, none comes twice."""

from __future__ import annotations

import io
import itertools
import logging
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader, rest_of_epoch, skip_first_batches
from acc_trainer.grad_sync import GradSync


class Stream(IterableDataset):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.size * self.epoch + i for i in range(first, self.size, step))


class Pairs(BatchSampler):
    """Batches of a user's own: of 1 and 2 samples in turn."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        places = iter(range(self.size))
        long = False
        while batch := list(itertools.islice(places, 1 + long)):
            yield batch
            long = not long

    def __len__(self):
        return sum(1 for _ in self)


def make(kind, size, batch, *, dispatch=False, split=False, workers=0, stateful=False, even=True):
    ranks = current_world().size
    many = {"num_workers": workers}
    if kind == "stream":
        loader = DataLoader(Stream(size), batch * (ranks if split else 1), **many)
    elif kind == "items":
        loader = DataLoader(range(size), None, **many)
    elif kind == "own batches":
        loader = DataLoader(range(size), batch_sampler=Pairs(size), **many)
    elif kind == "weighted":
        sampler = WeightedRandomSampler([1.0] * size, size, replacement=False)
        loader = DataLoader(range(size), batch * (ranks if split else 1), sampler=sampler, **many)
    else:
        generator = torch.Generator().manual_seed(4) if kind == "generator" else None
        size_of_all = batch * (ranks if split else 1)
        loader = DataLoader(range(size), size_of_all, shuffle=kind != "plain", generator=generator, **many)
    made = prepare_data_loader(
        loader,
        device=torch.device("cpu"),
        put_on_device=True,
        split_batches=split and kind not in ("items", "own batches"),
        dispatch_batches=dispatch and kind not in ("items", "own batches"),
        use_seedable_sampler=kind == "seeded",
        data_seed=11,
        use_stateful_dataloader=stateful,
        even_batches=even,
    )
    made._grad_sync = GradSync()
    return made


def samples(loader, batch):
    """The samples of this rank's batch that are its own."""
    rows = torch.as_tensor(batch).reshape(-1).tolist()
    return rows[: len(rows) - loader.position.padding]


def saved(loader):
    """What a file would bring back."""
    file = io.BytesIO()
    torch.save(loader.position.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(made, state, steps):
    """The samples of up to `steps` batches of this rank, whether the epoch ended, and where it stands then."""
    if state is not None:
        made.position.load_state_dict(state)
        assert made.position.not_dealt is None
    got, at = [], None
    passed = rest_of_epoch(made)
    for at, batch in enumerate(passed, start=1):
        got += samples(made, batch)
        if at == steps:
            return got, made.end_of_dataloader, saved(made)
    return got, True, None


WORLDS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 4)),
    min_size=2,
    max_size=4,
)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["plain", "seeded", "generator", "stream", "items", "own batches"]),
    size=st.integers(1, 40),
    worlds=WORLDS,
)
def test_an_epoch_dealt_out_to_one_world_after_another_has_every_sample_once(kind, size, worlds):
    state, seen = None, []
    for at, (ranks, batch, dispatch, split, steps) in enumerate(worlds):
        steps_now = None if at == len(worlds) - 1 else steps

        def work(ranks=ranks, batch=batch, dispatch=dispatch, split=split, steps=steps_now, state=state):
            # threads share torch's generator, so a law that draws from it is for ranks alone and for rank 0
            made = make(kind, size, batch, dispatch=dispatch, split=split)
            got = train(made, state, steps)
            full = [one for whole in made for one in samples(made, whole)] if steps is None else []
            return got, full

        results = run_threads(ranks, work)
        seen += [one for (got, _, _), _ in results for one in got]
        (_, ended, state), _ = results[0]
        if ended:
            break
    epoch = seen[0] // size if kind == "stream" else 0
    assert Counter(seen) == Counter(range(epoch * size, (epoch + 1) * size))
    following = Counter(one for _, full in results for one in full)
    if following:
        assert set(following.values()) == {1}
        assert len(following) == size


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "generator"])
@pytest.mark.parametrize("dispatch", [True, False])
def test_an_order_that_one_process_drew_from_a_generator_goes_on_on_others(kind, dispatch):
    torch.manual_seed(3)

    def alone():
        made = make(kind, 23, 2)
        state = None
        order = []
        for at, batch in enumerate(made, start=1):
            order += samples(made, batch)
            if at == 4:
                state = saved(made)
        return order, state

    ((order, state),) = run_threads(1, alone)

    def rest():
        made = make(kind, 23, 3, dispatch=dispatch and kind != "generator")
        return train(made, state, None)[0]

    # one rank with batches of another size, and two of which one reads
    for ranks in (1, 2) if dispatch and kind != "generator" else (1,):
        got = [one for of_rank in run_threads(ranks, rest) for one in of_rank]
        assert sorted(got) == sorted(order[8:])
        if ranks == 1:
            assert got == order[8:]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dispatch", [True, False])
def test_a_stream_that_workers_read_goes_on_behind_what_each_of_them_read(workers, dispatch):
    state, seen = None, []
    for ranks, steps in ((2, 2), (1, 3), (2, None)):
        results = run_threads(
            ranks,
            lambda state=state, steps=steps: train(
                make("stream", 41, 2, dispatch=dispatch, workers=workers), state, steps
            ),
        )
        seen += [one for got, _, _ in results for one in got]
        state = results[0][2]
    assert sorted(seen) == list(range(41))


def test_a_loop_in_every_epoch_over_the_rest_of_it_is_the_whole_of_all_others():
    made = make("plain", 6, 2)
    assert rest_of_epoch(made) is made
    for at, _ in enumerate(made):
        if at == 1:
            state = saved(made)
    again = make("plain", 6, 2)
    again.position.load_state_dict(state)
    epochs = [(again.iteration, [samples(again, one) for one in rest_of_epoch(again)]) for _ in range(2)]
    assert epochs == [(0, [[4, 5]]), (1, [[0, 1], [2, 3], [4, 5]])]


def test_a_checkpoint_of_the_last_batch_goes_on_with_the_next_epoch():
    made = make("plain", 6, 2)
    for _ in made:
        state = saved(made)
    for batch in (2, 3):
        again = make("plain", 6, batch)
        again.position.load_state_dict(state)
        assert again.iteration == 1
        assert rest_of_epoch(again) is again
        assert [one for batch in again for one in samples(again, batch)] == list(range(6))
        assert again.iteration == 2


def test_skipping_as_many_batches_as_were_saved_is_the_rest_of_the_epoch_for_other_worlds_too(caplog):
    def first():
        made = make("plain", 20, 2)
        return train(made, None, 3)

    state = run_threads(2, first)[0][2]
    again = make("plain", 20, 2)
    again.position.load_state_dict(state)
    rest = [one for batch in skip_first_batches(again, 3) for one in samples(again, batch)]
    assert rest == list(range(12, 20))
    again.position.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        rest = [one for batch in skip_first_batches(again, 5) for one in samples(again, batch)]
    assert rest == list(range(10, 20))
    assert "rest_of_epoch" in caplog.text


def test_a_run_that_is_killed_again_in_a_dealt_epoch_goes_on_in_it():
    state = run_threads(2, lambda: train(make("seeded", 30, 2), None, 3))[0][2]
    one, _, again = train(make("seeded", 30, 2), state, 2)
    rest, ended, _ = train(make("seeded", 30, 2), state, None)
    after, _, _ = train(make("seeded", 30, 2), again, None)
    assert ended
    assert rest == one + after
    assert len(rest) == 18


def test_what_cannot_be_dealt_out_begins_anew_and_says_why():
    pytest.importorskip("torchdata")
    state = run_threads(2, lambda: train(make("plain", 12, 2, stateful=True), None, 1))[0][2]
    again = make("plain", 12, 2, stateful=True)
    again.position.load_state_dict(state)
    assert "a state for each process" in again.position.not_dealt
    assert [one for batch in rest_of_epoch(again) for one in samples(again, batch)] == list(range(12))

    state = train(make("stream", 12, 2, workers=2), None, 1)[2]
    again = make("stream", 12, 2)
    again.position.load_state_dict(state)
    assert again.position.not_dealt == "2 workers read the stream, now there are 0"


def test_a_stateful_loader_that_dispatches_goes_on_on_any_number_of_ranks():
    pytest.importorskip("torchdata")
    state, seen = None, []
    for ranks, steps in ((2, 2), (1, 3), (3, None)):
        results = run_threads(
            ranks,
            lambda state=state, steps=steps: train(
                make("stream", 31, 2, dispatch=True, stateful=True), state, steps
            ),
        )
        seen += [one for got, _, _ in results for one in got]
        state = results[0][2]
    assert sorted(seen) == list(range(31))


def test_only_prepared_loaders_have_a_rest():
    with pytest.raises(TypeError, match="needs a loader that prepare"):
        rest_of_epoch(DataLoader(range(3)))
