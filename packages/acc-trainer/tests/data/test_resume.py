"""The product test: same samples in the same order after a resume as without it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

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
