"""GradientState: each Accelerator shows its own counter, and the newest one's is the one shown to everybody."""

from __future__ import annotations

from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_trainer import Accelerator
from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import GradientState


def test_gradient_state_shows_the_newest_accelerator_and_each_has_its_own():
    first = Accelerator(gradient_accumulation_steps=2)
    second = Accelerator(gradient_accumulation_steps=5)
    assert first.gradient_state.num_steps == 2
    assert second.gradient_state.num_steps == GradientState().num_steps == 5
    second.gradient_state._set_sync_gradients(False)
    assert first.sync_gradients
    assert not second.sync_gradients


def test_gradient_state_outside_a_loader():
    state = GradientState()
    assert (state.end_of_dataloader, state.remainder, state.in_dataloader) == (False, -1, False)
    assert state.active_dataloader is None
    assert state.plugin_kwargs == {}
    GradientState(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))
    assert (GradientState().num_steps, GradientState().sync_with_dataloader) == (3, False)
    assert GradientState().plugin_kwargs == {"num_steps": 3, "sync_with_dataloader": False}


def test_a_reset_gradient_state_starts_without_accumulation():
    Accelerator(gradient_accumulation_steps=4)
    GradientState._reset_state()
    assert GradientState().num_steps == 1
    assert isinstance(GradientState()._sync, GradSync)


def test_a_loop_of_the_users_own_notes_that_it_exchanged_gradients_on_xla():
    first, second = Accelerator(), Accelerator()
    assert not first.gradient_state.is_xla_gradients_synced
    first.gradient_state.is_xla_gradients_synced = True
    assert first.gradient_state.is_xla_gradients_synced
    assert not second.gradient_state.is_xla_gradients_synced
