"""The product test: same samples in the same order after a resume as without it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler

from acc_ops.random import capture_rng, restore_rng, set_seed
from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync


class Stream(IterableDataset):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (self.size * self.epoch + i for i in range(self.size))


@settings(max_examples=80)
@given(
    size=st.integers(1, 24),
    share=st.integers(1, 3),
    ranks=st.integers(1, 3),
    kind=st.sampled_from(["shuffled", "generator", "stream", "items"]),
    split=st.booleans(),
    dispatch=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
    done=st.integers(0, 8),
)
def test_a_resumed_pass_and_the_next_epoch_are_those_of_the_run_that_went_on(
    size, share, ranks, kind, split, dispatch, drop_last, epoch, done
):
    batch = share * ranks if split else share

    def make(seed):
        generator = torch.Generator().manual_seed(seed) if kind == "generator" else None
        if kind == "items":
            loader = DataLoader(range(size), None)
        elif kind == "stream":
            loader = DataLoader(Stream(size), batch, drop_last=drop_last)
        else:
            loader = DataLoader(range(size), batch, shuffle=True, drop_last=drop_last, generator=generator)
        made = prepare_data_loader(
            loader,
            device=current_world().device,
            put_on_device=True,
            split_batches=split and kind != "items",
            dispatch_batches=dispatch and kind != "items",
            use_seedable_sampler=kind == "shuffled",
            data_seed=seed,
        )
        made._grad_sync = GradSync()
        return made

    def rows(loader):
        return [torch.as_tensor(one).reshape(-1).tolist() for one in loader]

    def work():
        made = make(5)
        for _ in range(epoch):
            rows(made)
        passed, steps = iter(made), min(done, len(rows_of(make(5))))
        for _ in range(steps):
            next(passed)
        state = made.position.state_dict()
        wanted = [torch.as_tensor(one).reshape(-1).tolist() for one in passed], rows(made)

        again = make(6 if kind == "generator" else 5)
        again.position.load_state_dict(state)
        rest = rows(skip_first_batches(again, steps)) if steps else rows(again)
        assert (rest, rows(again)) == wanted
        return True

    def rows_of(loader):
        return rows(loader)

    assert all(run_threads(ranks, work))


class Drawing(IterableDataset):
    """A stream with an order and noise of its own, from each of the global generators."""

    def __iter__(self):
        numpy = pytest.importorskip("numpy")
        places = list(range(11))
        random.shuffle(places)
        for place in places:
            yield torch.tensor([float(place)]), torch.rand(1), random.random(), float(numpy.random.rand())


@pytest.mark.parametrize("done", [1, 4, 5, 6])
@pytest.mark.parametrize("left", [False, True])
def test_a_stream_that_draws_is_resumed_with_the_draws_it_would_have_had(done, left, tmp_path):
    def make():
        made = prepare_data_loader(DataLoader(Drawing(), 2))
        made._grad_sync = GradSync()
        return made

    def step(batch):
        return [torch.as_tensor(part).tolist() for part in batch], torch.rand(1).item(), random.random()

    def state_of(made):
        torch.save({"loader": made.position.state_dict(), "rng": capture_rng()}, tmp_path / "state")

    set_seed(1)
    made, wanted = make(), []
    for index, batch in enumerate(made):
        wanted.append(step(batch))
        if index + 1 == done:
            state_of(made)
    wanted += [step(batch) for batch in made]
    if left:  # a run that saves after it has left the loop
        set_seed(1)
        made = make()
        passed = iter(made)
        for _ in range(done):
            step(next(passed))
        passed.close()
        state_of(made)

    set_seed(2)
    again = make()
    state = torch.load(tmp_path / "state", weights_only=True)
    again.position.load_state_dict(state["loader"])
    restore_rng(state["rng"])
    rest = [] if done == 6 else [step(batch) for batch in skip_first_batches(again, done)]
    assert rest + [step(batch) for batch in again] == wanted[done:]


DRAWS = {"python": lambda: random.randrange(1000), "torch": lambda: int(torch.randint(1000, ()))}


class DrawsWhenRead(Sampler):
    """Draws each index when it is asked for, from a generator that the training draws from as well."""

    def __init__(self, kind):
        self.draw = DRAWS[kind]

    def __iter__(self):
        for _ in range(11):
            yield self.draw()

    def __len__(self):
        return 11


def _resumed_behind(done, make, tmp_path, step):
    """What the steps behind number `done` of three passes saw: of the run that went on, and of one that was resumed there."""

    def passes(made, count):
        return [step(batch) for _ in range(count) for batch in made]

    set_seed(1)
    made, wanted = make(), []
    for _ in range(3):
        for batch in made:
            wanted.append(step(batch))
            if len(wanted) == done:
                torch.save({"loader": made.position.state_dict(), "rng": capture_rng()}, tmp_path / "state")
    a_pass = len(wanted) // 3
    set_seed(2)
    again = make()
    state = torch.load(tmp_path / "state", weights_only=True)
    again.position.load_state_dict(state["loader"])
    restore_rng(state["rng"])
    whole, begun = divmod(done, a_pass)
    rest = [step(batch) for batch in skip_first_batches(again, begun)] if begun else []
    return wanted[done:], rest + passes(again, 3 - whole - bool(begun))


@pytest.mark.parametrize("done", [1, 3, 5, 6, 7, 11])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_sampler_that_draws_while_it_is_read_goes_on_with_the_draws_it_would_have_had(done, kind, tmp_path):
    def make():
        made = prepare_data_loader(DataLoader(range(1000), 2, sampler=DrawsWhenRead(kind)))
        made._grad_sync = GradSync()
        return made

    def step(batch):  # as dropout draws between two batches
        return batch.tolist(), torch.rand(1).item(), random.random()

    wanted, resumed = _resumed_behind(done, make, tmp_path, step)
    assert resumed == wanted


class Counting(IterableDataset):
    """A stream that does not ask for the epoch, of which workers that stay would not hear."""

    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize("done", [1, 4, 5, 7])
@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_workers_that_stay_get_the_order_they_would_have_had(done, kind, tmp_path):
    def make():
        data = range(8) if kind == "samples" else Counting()
        loader = DataLoader(data, 2, shuffle=kind == "samples", num_workers=1, persistent_workers=True)
        made = prepare_data_loader(loader)
        made._grad_sync = GradSync()
        return made

    def step(batch):
        return batch.tolist(), torch.rand(1).item()

    wanted, resumed = _resumed_behind(done, make, tmp_path, step)
    assert resumed == wanted


def test_an_epoch_is_a_whole_number_of_at_least_0():
    made = prepare_data_loader(DataLoader(range(8), 2, shuffle=True))
    made.set_epoch(torch.tensor(3))
    assert made.iteration == 3
    assert type(made.position.state_dict()["epoch"]) is int
    with pytest.raises(TypeError, match=r"epoch must be a whole number, got 2\.0"):
        made.set_epoch(2.0)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        made.set_epoch(-1)
