"""Means of losses over parts: their mean is that over all targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from acc_ops.testing import run_threads
from acc_plugins.parallel.losses import is_counted, mean_loss
from acc_plugins.parallel.reach import AverageLosses


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    targets = torch.tensor([-100, -100, -100, -100, 0, 1, -100, 3])  # the first half has none
    return scores, targets


@pytest.mark.parametrize(
    "options", [{}, {"weight": torch.arange(1.0, 6.0, dtype=torch.float64)}, {"label_smoothing": 0.2}]
)
def test_ranks_with_unequal_numbers_of_targets_have_the_whole_s_mean(line_here: Any, options: Any) -> None:
    scores, targets = _data()
    expected = F.cross_entropy(scores, targets, **options)

    def part() -> torch.Tensor:
        line = line_here()
        with AverageLosses(line):
            return F.cross_entropy(line.mine(scores, 0), line.mine(targets, 0), **options)

    torch.testing.assert_close(torch.stack(run_threads(2, part)).mean(), expected)


def test_log_likelihoods_count_alike(line_here: Any) -> None:
    scores, targets = _data()
    scores = scores.log_softmax(-1)

    def part() -> torch.Tensor:
        line = line_here()
        return mean_loss(F.nll_loss, line, (line.mine(scores, 0), line.mine(targets, 0)), {})

    assert is_counted(F.nll_loss)
    assert not is_counted(F.mse_loss)
    torch.testing.assert_close(torch.stack(run_threads(2, part)).mean(), F.nll_loss(scores, targets))


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}])
def test_other_reductions_are_torch_s_own(line_here: Any, options: Any) -> None:
    scores, targets = _data()

    def part() -> None:
        line = line_here()
        mine = line.mine(scores, 0), line.mine(targets, 0)
        with AverageLosses(line):
            got = F.cross_entropy(*mine, **options)
            probabilities = F.cross_entropy(mine[0], mine[0].softmax(-1))
        torch.testing.assert_close(got, F.cross_entropy(*mine, **options))
        torch.testing.assert_close(probabilities, F.cross_entropy(mine[0], mine[0].softmax(-1)))

    run_threads(2, part)
