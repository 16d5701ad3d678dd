"""join_uneven_inputs: what it overrides comes back."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_trainer import Accelerator


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_ranks_get_what_there_is_inside_and_even_batches_afterwards():
    def work():
        accelerator = Accelerator()
        loader, _stream = accelerator.prepare(
            DataLoader(torch.ones(5, 1)), DataLoader(Stream(), batch_size=2)
        )
        with accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)], even_batches=False):
            inside = len(list(loader)), len(loader)
        return inside, len(list(loader))

    assert run_threads(2, work) == [((3, 3), 3), ((2, 2), 3)]


def test_even_batches_come_back_after_an_error():
    def work():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(torch.ones(5, 1)))
        with pytest.raises(KeyError):
            with accelerator.join_uneven_inputs([], even_batches=False):
                raise KeyError("x")
        return loader.batch_sampler.even_batches

    assert run_threads(2, work) == [True, True]


def test_what_has_no_effect_says_so(caplog):
    def work():
        accelerator = Accelerator()
        accelerator.prepare(DataLoader(Stream(), batch_size=2))
        with accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)], even_batches=False):
            pass

    run_threads(2, work)
    assert "no prepared loader is split" in caplog.text
    assert "no effect on Linear" in caplog.text


def test_one_process_joins_nobody():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.ones(3, 1)))
    with accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)], even_batches=False):
        assert len(list(loader)) == 3


def test_a_window_ends_on_all_ranks_when_one_of_them_ends():
    def work():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader = accelerator.prepare(DataLoader(torch.ones(7, 1)))
        seen = []
        with accelerator.join_uneven_inputs([], even_batches=False):
            for _ in loader:
                with accelerator.accumulate():
                    seen.append((accelerator.sync_gradients, loader.end_of_dataloader))
        return seen

    no, yes = (False, False), (True, False)
    assert run_threads(2, work) == [[no, yes, yes, (True, True)], [no, yes, (True, True)]]


def test_ranks_that_compute_every_step_together_refuse_what_would_wait_for_ever(monkeypatch):
    def work():
        accelerator = Accelerator()
        monkeypatch.setattr(type(accelerator.strategy), "waits_for_all", True)
        with accelerator.join_uneven_inputs([]):
            pass
        with pytest.raises(ValueError, match=r"cannot join Linear.*even_batches=True"):
            with accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)]):
                pass

    run_threads(2, work)
