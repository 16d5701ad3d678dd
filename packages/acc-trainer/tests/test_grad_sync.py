"""GradSync: when a micro-batch ends a window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from acc_trainer.grad_sync import AdvanceOnly, GradSync, HoldBack


def handed(is_last: bool) -> SimpleNamespace:
    """A loader's position with its last batch in use, or another one."""
    return SimpleNamespace(is_last=is_last, ends_window=is_last)


def test_every_num_steps_th_micro_batch_synchronises():
    sync = GradSync(3)
    seen = []
    for _ in range(7):
        sync.advance()
        seen.append(sync.sync)
    assert seen == [False, False, True, False, False, True, False]
    assert sync.steps == 7


def test_the_last_batch_of_a_loader_ends_the_window_and_starts_a_new_one():
    sync, position = GradSync(4), handed(False)
    sync.enter(position)
    sync.advance()
    assert not sync.sync
    position.is_last = position.ends_window = True
    sync.advance()
    assert sync.sync
    position.is_last = position.ends_window = False
    for expected in (False, False, False, True):
        sync.advance()
        assert sync.sync is expected


def test_without_sync_with_loader_the_window_goes_on_over_the_end():
    sync, position = GradSync(2, sync_with_loader=False), handed(True)
    sync.enter(position)
    sync.advance()
    sync.leave(position, finished=True)
    assert not sync.sync
    sync.advance()
    assert sync.sync


def test_only_the_loader_that_handed_out_last_counts():
    sync, outer, inner = GradSync(9), handed(True), handed(False)
    sync.enter(outer)
    sync.enter(inner)
    assert not sync.end_of_loader
    sync.raise_to_top(outer)
    assert sync.end_of_loader
    sync.leave(outer, finished=True)
    assert not sync.end_of_loader


def test_leaving_the_outermost_loader_early_breaks_the_window_and_an_inner_one_does_not():
    sync, outer, inner = GradSync(3), handed(False), handed(False)
    sync.enter(outer)
    sync.advance()
    sync.enter(inner)
    sync.leave(inner, finished=False)
    assert not sync.sync
    assert sync.index == 1
    sync.leave(outer, finished=False)
    assert sync.sync
    assert sync.index == 0


def test_gradients_of_a_broken_window_are_dropped_when_the_next_one_starts():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    sync, position = GradSync(2), handed(False)
    sync.optimizers.add(optimizer)
    sync.enter(position)
    sync.advance()
    weight.grad = torch.ones(1)
    sync.leave(position, finished=False)
    assert weight.grad is not None  # a step right after the loop may still use it
    sync.advance()
    assert weight.grad is None


def test_state_goes_round():
    sync = GradSync(3)
    for _ in range(4):
        sync.advance()
    other = GradSync(3)
    other.load_state_dict(sync.state_dict())
    assert (other.index, other.sync, other.steps) == (1, False, 4)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_a_bad_number_of_steps_is_refused_with_the_value(steps):
    with pytest.raises(ValueError, match=r"at least 1, got"):
        GradSync(steps)


def test_the_shared_context_counts_each_time_it_is_entered():
    sync = GradSync(2)
    context = AdvanceOnly(sync)
    with context:
        assert not sync.sync
    with context:
        assert sync.sync


class Held:
    """A context that notes when it is open."""

    def __init__(self):
        self.open = []

    def __call__(self, model):
        held = self

        class Context:
            def __enter__(self):
                held.open.append(model)

            def __exit__(self, *error):
                held.open.remove(model)

        return Context()


def test_models_are_held_back_only_inside_a_window():
    sync, held = GradSync(2), Held()
    with HoldBack(sync, held, ["a", "b"]):
        assert held.open == ["a", "b"]
    assert held.open == []
    with HoldBack(sync, held, ["a", "b"]):
        assert held.open == []


def test_sync_each_batch_never_holds_back():
    sync, held = GradSync(2, sync_each_batch=True), Held()
    with HoldBack(sync, held, ["a"]):
        assert held.open == []
        assert not sync.sync


def test_models_are_let_go_after_an_error():
    sync, held = GradSync(2), Held()
    with pytest.raises(KeyError):
        with HoldBack(sync, held, ["a"]):
            raise KeyError("x")
    assert held.open == []


class _Place:
    def __init__(self):
        self.calls = []

    def give(self, saved):
        self.calls.append(saved)

    def scale(self, factor):
        self.calls.append(factor)


def test_what_a_strategy_holds_back_is_dropped_and_scaled_with_the_gradients_that_show():
    place, grad_sync = _Place(), GradSync(4, average_short_window=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    grad_sync.optimizers.add(optimizer)
    grad_sync.holder = lambda: SimpleNamespace(held_gradients=lambda: [place])
    grad_sync.advance()
    grad_sync.abandon()
    assert place.calls == []
    grad_sync.advance()
    assert place.calls == [None]
    grad_sync.enter(handed(True))
    grad_sync.advance()
    assert place.calls == [None, 2.0]
