"""LocalSGD: weights drift apart and are averaged."""

from __future__ import annotations

import pytest
import torch

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, LocalSGD


def weights(steps, local_steps, enabled=True):
    def work():
        accelerator = Accelerator()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=local_steps, enabled=enabled
        ) as local:
            for _ in range(steps):
                accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                seen.append(accelerator.unwrap_model(model).weight.item())
        return [*seen, accelerator.unwrap_model(model).weight.item()]

    return run_threads(2, work)


def test_weights_are_averaged_every_few_steps_and_at_the_end():
    assert weights(3, 2) == [[0.0, -1.0, -1.0, -1.5], [-1.0, -1.0, -2.0, -1.5]]


def test_disabled_it_changes_nothing():
    assert weights(2, 1, enabled=False) == [[-0.5, -1.0, -1.0]] * 2


def test_one_process_has_nothing_to_average():
    accelerator = Accelerator()
    with LocalSGD(accelerator, torch.nn.Linear(1, 1), 4) as local:
        local.step()
        assert not local.enabled


def test_a_failing_rank_does_not_wait_for_the_others():
    def work():
        accelerator = Accelerator()
        with LocalSGD(accelerator, accelerator.prepare(torch.nn.Linear(1, 1)), 4):
            raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        run_threads(2, work, timeout_s=10)


def test_a_loop_that_fails_leaves_each_rank_its_own_weights():
    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        with pytest.raises(RuntimeError, match="out of data"), LocalSGD(accelerator, model, 4):
            torch.nn.init.constant_(next(model.parameters()), accelerator.process_index)
            raise RuntimeError("out of data")
        return next(model.parameters()).item()

    assert run_threads(2, work) == [0.0, 1.0]


@pytest.mark.parametrize("steps", [0, -2, 1.5])
def test_a_bad_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match="at least 1, got"):
        LocalSGD(Accelerator(), torch.nn.Linear(1, 1), steps)
