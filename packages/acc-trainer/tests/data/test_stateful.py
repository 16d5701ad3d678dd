"""Loaders over torchdata's StatefulDataLoader continue by themselves."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_trainer.data.prepare import prepare_data_loader
from acc_trainer.grad_sync import GradSync

has_torchdata = importlib.util.find_spec("torchdata") is not None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


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
