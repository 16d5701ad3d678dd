"""State from construction is told in a few numbers, and made again where it has no values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.strategies.begun_states import Same, filled, give_values, summary_of


def test_a_state_is_told_by_one_number_and_filled_again_in_another_shape() -> None:
    state = {"sum": torch.full((2, 3), 0.5), "step": torch.tensor(0.0), "factor": 0.9, "name": None}
    told: Any = summary_of(state, torch.Size((2, 3)))
    assert told == {
        "sum": Same(0.5, torch.float32),
        "step": Same(0.0, torch.float32, (), "cpu"),
        "factor": 0.9,
        "name": None,
    }
    like = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(filled(told["sum"], like), torch.full((4,), 0.5))
    assert filled(told["step"], like).shape == ()
    assert filled(told["factor"], like) == 0.9


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, 2.0]),
        torch.empty(2, device="meta"),
        torch.empty(0),
        [1.0],
        torch.tensor([float("nan")]),
    ],
)
def test_what_one_number_does_not_tell_is_not_told(value: Any) -> None:
    assert summary_of({"sum": value}, torch.Size((2,))) is None


def _adagrad(device: str) -> tuple[nn.Module, Any]:
    with torch.device(device):
        model = nn.Linear(3, 2)
        return model, torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.25)


def test_ranks_without_values_get_rank_0s_numbers_and_no_memory() -> None:
    def on_a_rank() -> None:
        world = current_world()
        model, optimizer = _adagrad("cpu" if world.is_main else "meta")
        give_values([optimizer], world)
        for p in model.parameters():
            state = optimizer.state[p]
            assert torch.equal(state["sum"], torch.full(p.shape, 0.25))
            assert (state["step"].item(), state["step"].dtype) == (0.0, torch.float32)
            assert world.is_main or set(state["sum"].stride()) == {0}

    run_threads(2, on_a_rank)


def test_nothing_is_sent_where_nothing_was_begun_and_nothing_changed_where_all_have_values() -> None:
    def on_a_rank() -> None:
        world = current_world()
        plain = nn.Linear(2, 2)
        give_values([torch.optim.SGD(plain.parameters(), lr=0.1)], world)
        _, optimizer = _adagrad("cpu")
        before = [state["sum"] for state in optimizer.state.values()]
        give_values([optimizer], world)
        assert all(
            state["sum"] is value for state, value in zip(optimizer.state.values(), before, strict=True)
        )

    run_threads(2, on_a_rank)


def test_steps_that_other_ranks_cannot_follow_are_an_error_on_all() -> None:
    def on_a_rank() -> None:
        world = current_world()
        model, optimizer = _adagrad("cpu" if world.is_main else "meta")
        if world.is_main:
            model(torch.arange(3.0)).sum().backward()
            optimizer.step()
        with pytest.raises(ValueError, match="prepare it before its first step"):
            give_values([optimizer], world)

    run_threads(2, on_a_rank)
