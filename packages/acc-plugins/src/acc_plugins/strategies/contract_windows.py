"""What every strategy must keep of windows, micro-batches under `without_sync`, however these end: a part of the strategy contract."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from acc_plugins.strategies.contract_base import ContractBase
from acc_plugins.strategies.contract_samples import doubles
from acc_plugins.strategies.strategy import Strategy


class WindowContract(ContractBase):
    """Gradients stay on their rank in a window; a step takes the mean over all ranks however the window ended; nothing that was emptied comes back."""

    def test_without_sync_keeps_gradients_on_their_rank_until_they_are_synchronised(self) -> None:
        self.on_ranks("check_sync")

    def test_a_step_behind_a_window_that_was_broken_off_exchanges_what_it_held(self) -> None:
        self.on_ranks("check_broken_window")

    def test_a_window_that_was_broken_off_and_emptied_leaves_nothing_behind(self) -> None:
        self.on_ranks("check_emptied_window")

    def test_a_rank_that_leaves_out_its_micro_batches_takes_part_in_the_exchange(self) -> None:
        self.on_ranks("check_left_out")

    def test_half_a_window_goes_on_where_it_is_given_and_is_gone_where_nothing_is(self) -> None:
        self.on_ranks("check_given_window")

    def check_sync(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        reference.backward()
        x, y = self._share(strategy.world)
        if self.shows_local_gradients:
            with strategy.without_sync(model):
                strategy.backward(self.loss(model, x, y))
            alone = _gradients_of_all_ranks(strategy, model)
            assert strategy.world.size == 1 or not torch.allclose(alone[0], alone[-1])
            optimizer.zero_grad()
        with strategy.without_sync(model):
            loss = self.loss(model, x, y)
            with strategy.sync_next_backward(model):
                strategy.backward(loss)
        self._assert_close(self.whole_gradients(strategy, model), reference.gradients())

    def check_broken_window(self) -> None:
        """A step takes the mean over all ranks, and so does that of the next window, also where the first micro-batch of the broken one synchronised."""
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        for first_synchronises, look in ((False, True), (False, False), (True, True), (True, False)):
            self._break_off(strategy, model, first_synchronises)
            reference.backward()
            if look:
                strategy.exchange_held()
                self._assert_close(self.whole_gradients(strategy, model), reference.gradients())
                norm = strategy.clip_norm(list(model.parameters()), 1e9)
                torch.testing.assert_close(norm.cpu(), reference.norm(), rtol=self.rtol, atol=0)
            strategy.step(optimizer)
            reference.optimizer.step()
            optimizer.zero_grad()
            self._assert_state(strategy, model, reference.model.state_dict())
            expected = reference.step()
            got = self._train(strategy, model, optimizer, steps=1)
            self._assert_close({"loss": doubles(got)}, {"loss": doubles([expected])})

    def check_emptied_window(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        for first_synchronises, by_optimizer in ((False, True), (False, False), (True, True), (True, False)):
            self._break_off(strategy, model, first_synchronises)
            optimizer.zero_grad()
            if by_optimizer:
                strategy.drop_held(optimizer)
            else:
                for place in strategy.held_gradients():
                    place.give(None)
            self._train(strategy, model, optimizer, steps=1)
            reference.step()
            self._assert_state(strategy, model, reference.model.state_dict())

    def check_left_out(self) -> None:
        """The first share of the batch counts as nothing. Where ranks need each other in every backward, all of it is left out."""
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        index, count = self.data_place(strategy.world)
        with strategy.without_sync(model):
            loss = self.loss(model, *self._share(strategy.world))
            if index > 0 and not strategy.waits_for_all:
                strategy.backward(loss)
        strategy.step(optimizer)
        if count > 1 and not strategy.waits_for_all:
            x, y = (torch.cat(part.chunk(count)[1:]) for part in self.batch())
            (mse_loss(reference.model(x), y) * (count - 1) / count).backward()
            reference.optimizer.step()
        self._assert_state(strategy, model, reference.model.state_dict())

    def check_given_window(self) -> None:
        """As a checkpoint gives it, to a new run and to one that stands in another window; and as one gives nothing."""
        for first_synchronises in (False, True):
            strategy, model, optimizer = self._prepared()
            reference = self._reference()
            self._break_off(strategy, model, first_synchronises)
            again, other, other_optimizer = self._prepared()
            self._break_off(again, other, not first_synchronises)
            saved = {name: place.take() for name, place in strategy.gradient_places(model).items()}
            again.note_held(other, True)
            for name, place in again.gradient_places(other).items():
                place.give(saved[name])
            for place in strategy.gradient_places(model).values():
                place.give(None)
            strategy.note_held(model, False)
            again.step(other_optimizer)
            self._train(strategy, model, optimizer, steps=1)
            reference.step()
            for one, trained in ((again, other), (strategy, model)):
                self._assert_state(one, trained, reference.model.state_dict())

    def _break_off(self, strategy: Strategy, model: nn.Module, first_synchronises: bool) -> None:
        """All micro-batches, the first of them with or without synchronising, then one that gets no backward."""
        x, y = self._share(strategy.world)
        for number, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            synchronises = first_synchronises and number == 0
            with nullcontext() if synchronises else strategy.without_sync(model):
                strategy.backward(self.loss(model, part, target), divisor=2)
        with strategy.without_sync(model):
            self.loss(model, x, y)


def _gradients_of_all_ranks(strategy: Strategy, model: nn.Module) -> Tensor:
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return strategy.world.comm.all_gather(flat)
