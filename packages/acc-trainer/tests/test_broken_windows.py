"""A step behind a window that was broken off is the step of one process that saw all of its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.testing import run_threads
from acc_trainer.accelerator import Accelerator
from acc_trainer.local_sgd import LocalSGD

DATA = torch.arange(24.0).double().view(24, 1) / 24


class Enough(Exception):
    pass


def _run(way: str, ranks: int) -> Any:
    """The weights of each rank after a broken window, a step, a clip, and a window that ends as usual."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(-0.25)
    # a rank's batch is its share of the batch of one process
    loader = DataLoader(TensorDataset(DATA), 6 // ranks)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5), loader)

    def micro_batch(x: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - x.square()).square().mean())
            if way == "override":
                accelerator.gradient_state.sync_gradients = True
                optimizer.step()
                optimizer.zero_grad()

    try:
        for number, (x,) in enumerate(loader, start=1):
            micro_batch(x)
            if number == 2 and way == "break":
                break
            if number == 2 and way == "exception":
                raise Enough
            if number == 2 and way == "override":
                break
    except Enough:
        pass
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01) if way != "override" else None
    optimizer.step()
    optimizer.zero_grad()
    for (x,) in loader:
        micro_batch(x)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), norm


@pytest.mark.parametrize("way", ["break", "exception", "override"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_stay_equal_and_are_one_process(way: str, ranks: int) -> None:
    ((expected, norm),) = run_threads(1, lambda: _run(way, 1))
    for weights, own_norm in run_threads(ranks, lambda: _run(way, ranks)):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
        if norm is not None:
            torch.testing.assert_close(own_norm, norm, rtol=1e-12, atol=1e-14)


def test_ranks_that_train_apart_still_do() -> None:
    def run() -> tuple[float, float]:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False).double()
        model.weight.data.zero_()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        with LocalSGD(accelerator, model, 8) as local:
            with accelerator.accumulate(model):
                accelerator.backward(-model(torch.ones(1, 1).double() * accelerator.process_index).sum())
                optimizer.step()
                local.step()
            apart = next(model.parameters()).item()
        return apart, next(model.parameters()).item()

    assert run_threads(2, run) == [(0.0, 0.5), (1.0, 0.5)]
