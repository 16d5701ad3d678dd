"""A run that is saved and killed again and again, each time going on in another layout: every epoch has every sample once."""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader, rest_of_epoch, skip_first_batches
from acc_trainer.grad_sync import GradSync

KINDS = ["plain", "seeded", "generator", "drawn", "weighted", "stream", "items", "own batches"]
if importlib.util.find_spec("torchdata") is not None:
    KINDS += ["stateful", "stateful stream"]


class Layout(NamedTuple):
    """How one life of the run is split, and how it ends."""

    ranks: int
    batch: int
    dispatch: bool
    split: bool
    steps: int  # 0: it saves right after the load
    saves: str  # where: in the loop, behind it, or with a pass begun that has read nothing
    used: int  # batches that its loader had read already when it loaded
    skips: int = 0  # it says `skip_first_batches`, so many times, rather than `rest_of_epoch`


class Stream(IterableDataset):
    """The samples of an epoch have numbers of their own, also where several workers read them."""

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


def raw_loader(kind, size, batch, workers, life):
    """The user's loader; generators do not stand where they stood in the life before."""
    if "stream" in kind:
        return DataLoader(Stream(size), batch, num_workers=workers)
    if kind == "items":
        return DataLoader(range(size), None, num_workers=workers)
    if kind == "own batches":
        return DataLoader(range(size), batch_sampler=Pairs(size), num_workers=workers)
    if kind == "weighted":
        own = torch.Generator().manual_seed(life)
        sampler = WeightedRandomSampler([1.0] * size, size, replacement=False, generator=own)
        return DataLoader(range(size), batch, sampler=sampler, num_workers=workers)
    generator = torch.Generator().manual_seed(life) if kind == "generator" else None
    shuffle = kind != "plain"
    return DataLoader(range(size), batch, shuffle=shuffle, generator=generator, num_workers=workers)


def prepared(kind, size, layout, workers, life):
    fixed = kind in ("items", "own batches")
    # ranks that are threads share torch's generator: only one of them may draw an order from it
    dispatch = (layout.dispatch and not fixed) or kind == "drawn"
    split = layout.split and not fixed and "stateful" not in kind
    batch = layout.batch * (layout.ranks if split else 1)
    made = prepare_data_loader(
        raw_loader(kind, size, batch, workers, life),
        put_on_device=True,
        device=torch.device("cpu"),
        split_batches=split,
        dispatch_batches=dispatch,
        use_seedable_sampler=kind == "seeded",
        data_seed=11,
        use_stateful_dataloader="stateful" in kind,
    )
    made._grad_sync = GradSync()
    return made


def saved(loader):
    """What a file would bring back."""
    file = io.BytesIO()
    torch.save(loader.position.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def samples(loader, batch):
    """The samples of this rank's batch that are its own."""
    rows = torch.as_tensor(batch).reshape(-1).tolist()
    return rows[: len(rows) - loader.position.padding]


def rest(loader, skips, behind):
    """The rest of an epoch of which `behind` batches were handed out before a load; a script that skips may do it over a twin of a twin."""
    if not skips:
        return rest_of_epoch(loader)
    return (
        skip_first_batches(skip_first_batches(loader, behind), 0)
        if skips == 2
        else skip_first_batches(loader, behind)
    )


def live(kind, size, layout, states, workers, life, last):
    """One life of one rank: what it saw, by epoch, and the state that it saved."""
    world = current_world()
    made = prepared(kind, size, layout, workers, life)
    for _ in itertools.islice(made, layout.used):
        pass
    if states is not None:
        made.position.load_state_dict(states[world.rank if len(states) == world.size else 0])
        assert made.position.not_dealt is None
    # what was saved before anything was read in this layout has no number of batches that a script could skip
    behind = 0 if states is None or made.position._at_end else made.position.saved_batches
    skips = layout.skips if behind or not made.position.is_dealt else 0
    seen, left = [], layout.steps
    if not left and layout.saves == "begun" and not last:
        passed = iter(rest(made, skips, behind))
        state = saved(made)
        passed.close()
        return seen, state
    for _ in range(2 if last else left):
        batch = None
        for batch in rest(made, skips, behind):
            seen += [(made.position.epoch, one) for one in samples(made, batch)]
            left -= 1
            if not left and not last:
                if layout.saves == "inside":
                    return seen, saved(made)
                break
        assert batch is not None, "a pass without a batch"
        behind = 0
        if left <= 0 and not last:
            break
    return seen, saved(made)


LAYOUTS = st.builds(
    Layout,
    ranks=st.integers(1, 4),
    batch=st.integers(1, 4),
    dispatch=st.booleans(),
    split=st.booleans(),
    steps=st.sampled_from([0, 1, 0, 2, 3, 4]),
    saves=st.sampled_from(["inside", "behind", "begun"]),
    used=st.sampled_from([0, 0, 1, 2]),
    skips=st.integers(0, 2),
)


def run_chain(kind, size, layouts, workers=0):
    states, seen = None, []
    if (
        "stateful" in kind
    ):  # its own state counts batches of one size, and is one for each rank unless rank 0 reads
        first = layouts[0]
        alike = {"batch": first.batch, "dispatch": first.dispatch}
        alike.update({} if first.dispatch else {"ranks": first.ranks})
        layouts = [one._replace(**alike) for one in layouts]
    layouts = [layouts[0]._replace(used=0), *layouts[1:]]
    for at, layout in enumerate(layouts):
        last = at == len(layouts) - 1
        results = run_threads(layout.ranks, partial(live, kind, size, layout, states, workers, at, last))
        seen += [one for of_rank, _ in results for one in of_rank]
        states = [state for _, state in results]
    by_epoch = {}
    for epoch, one in seen:
        by_epoch.setdefault(epoch, []).append(one)
    assert sorted(by_epoch) == list(range(len(by_epoch)))
    for epoch, got in by_epoch.items():
        first = size * epoch if "stream" in kind else 0
        assert Counter(got) == Counter(range(first, first + size)), f"epoch {epoch}"


@settings(max_examples=120)
@given(
    kind=st.sampled_from(KINDS), size=st.integers(1, 40), layouts=st.lists(LAYOUTS, min_size=2, max_size=5)
)
def test_each_epoch_of_a_run_that_was_resumed_in_other_layouts_has_every_sample_once(kind, size, layouts):
    run_chain(kind, size, layouts)


@pytest.mark.parametrize("kind", ["drawn", "seeded", "stream"])
def test_so_it_has_where_workers_read(kind):
    lives = [(1, 2, 3), (2, 1, 0), (2, 1, 2), (1, 2, 0), (1, 2, 0)]
    layouts = [Layout(ranks, batch, True, False, steps, "inside", 0) for ranks, batch, steps in lives]
    run_chain(kind, 17, layouts, workers=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saves", ["inside", "behind"])
def test_a_dealt_epoch_that_was_saved_at_its_last_batch_is_followed_by_a_whole_one(kind, saves):
    lives = [(1, 1), (2, 2), (3, 1), (1, 1)]  # 2 of 8 samples, the other 6, 6 of the next epoch
    run_chain(kind, 8, [Layout(ranks, 2, False, False, steps, saves, 0) for ranks, steps in lives])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saves", ["inside", "begun"])
def test_a_run_that_saves_right_after_it_was_loaded_in_another_layout_loses_nothing(kind, saves):
    lives = [(3, 2, 1), (1, 3, 0), (1, 3, 0), (2, 3, 1), (2, 1, 0), (2, 1, 2)]
    layouts = [Layout(ranks, batch, True, False, steps, saves, 1) for ranks, batch, steps in lives]
    run_chain(kind, 31, layouts)
