"""What is told before rank 0's weights are sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.strategies.same_start import must_be_sent


class Retied(nn.Sequential):
    def tie_weights(self) -> None:
        raise RuntimeError("cannot tie")


def _built(*, empty: bool) -> nn.Module:
    with torch.device("meta" if empty else "cpu"):
        return Retied(nn.Linear(2, 2))


@pytest.mark.parametrize("odd", [0, 1])
def test_what_tying_an_empty_model_raises_on_one_rank_is_raised_on_all(odd: int) -> None:
    def run() -> str:
        world = current_world()
        with pytest.raises(RuntimeError, match="cannot tie") as caught:
            must_be_sent(_built(empty=world.rank == odd), world, [], None)
        return str(caught.value.__cause__)

    told = run_threads(2, run, timeout_s=10)
    assert told[1 - odd] == f"rank {odd} raised this"


def test_why_a_rank_cannot_go_on_comes_before_what_tying_raises() -> None:
    def run() -> None:
        world = current_world()
        with pytest.raises(KeyError, match="no such block"):
            must_be_sent(_built(empty=True), world, [], KeyError("no such block") if world.is_main else None)

    run_threads(2, run, timeout_s=10)


def test_weights_are_sent_where_some_rank_has_none() -> None:
    def run() -> list[bool]:
        world = current_world()
        sent = []
        for empty in (False, world.rank == 1):
            with torch.device("meta" if empty else "cpu"):
                sent.append(must_be_sent(nn.Linear(2, 2), world, ["0"], None))
        return sent

    assert run_threads(2, run, timeout_s=10) == [[False, True]] * 2
