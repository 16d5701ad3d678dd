"""What every strategy must keep, as a test class; `acc_plugins.testing` is its front door."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from acc_ops.collectives import barrier
from acc_ops.testing import run_threads
from acc_ops.world import World, current_world
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.strategy import Bundle, Strategy

_FEATURES, _PER_RANK = 5, 4  # samples per rank: two micro-batches of two


class SkippingPrecision(Precision):
    """A precision whose every step is skipped, as an overflow skips one."""

    def step(self, optimizer: Any, closure: Any = None) -> StepOutcome:  # noqa: ARG002
        return StepOutcome(False, None)


class StrategyContract:
    """Prepare keeps order; two micro-batches equal one big batch; clip returns the true norm; a skipped step says so; save, load and
    go on as if nothing had happened; unwrap gives the original back. All of it in float64, against plain torch on the whole batch."""

    size: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    rtol: ClassVar[float] = 1e-9

    def make_strategy(self, world: World, precision: Precision) -> Strategy:
        """The strategy under test, for one rank."""
        raise NotImplementedError

    def on_ranks(self, check: str, *args: Any) -> None:
        """Run the method called `check` on every rank."""
        run_threads(self.size, lambda: getattr(self, check)(*args), device=self.device)

    def strategy(self, precision: Precision | None = None) -> Strategy:
        """A new one for the current rank."""
        return self.make_strategy(current_world(), precision or Precision())

    def test_prepare_keeps_the_order_and_every_parameter_its_optimizer(self) -> None:
        self.on_ranks("check_prepare")

    def test_two_micro_batches_equal_one_big_batch(self) -> None:
        self.on_ranks("check_micro_batches")

    def test_clip_norm_returns_the_true_norm_and_clips_to_it(self) -> None:
        self.on_ranks("check_clip_norm")

    def test_clip_value_limits_every_element(self) -> None:
        self.on_ranks("check_clip_value")

    def test_a_step_says_that_it_ran_and_returns_what_the_optimizer_returned(self) -> None:
        self.on_ranks("check_step")

    def test_a_skipped_step_says_so(self) -> None:
        self.on_ranks("check_skipped_step")

    def test_a_saved_and_loaded_run_goes_on_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        self.on_ranks("check_save_and_load", str(tmp_path))

    def test_tied_weights_stay_tied_through_save_and_load(self, tmp_path: Path) -> None:
        self.on_ranks("check_tied_weights", str(tmp_path))

    def test_unwrap_gives_the_original_back_and_state_has_its_names(self) -> None:
        self.on_ranks("check_unwrap")

    def test_models_that_train_nothing_are_prepared_too(self) -> None:
        self.on_ranks("check_frozen_and_evaluation")

    def test_every_rank_trains_rank_0s_weights(self) -> None:
        self.on_ranks("check_same_start")

    def test_without_sync_keeps_gradients_on_their_rank_until_they_are_synchronised(self) -> None:
        self.on_ranks("check_sync")

    def check_prepare(self) -> None:
        strategy = self.strategy()
        models = [_model(seed) for seed in range(3)]
        optimizers: list[Any] = [
            torch.optim.SGD(model.parameters(), lr=0.1 * i) for i, model in enumerate(models, 1)
        ]
        schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in optimizers]
        got = strategy.prepare(
            Bundle(models=list(models), optimizers=list(optimizers), schedulers=list(schedulers))
        )
        assert [strategy.unwrap(model) for model in got.models] == models
        assert len(got.optimizers) == len(got.schedulers) == 3
        for model, optimizer, given in zip(models, got.optimizers, optimizers, strict=True):
            assert optimizer.param_groups[0]["lr"] == given.param_groups[0]["lr"]
            assert _ids(optimizer.param_groups[0]["params"]) == _ids(model.parameters())
        for scheduler, optimizer in zip(got.schedulers, got.optimizers, strict=True):
            assert scheduler.optimizer is optimizer

    def check_micro_batches(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = _Reference(strategy)
        for _ in range(3):
            _accumulate(strategy, model)
            strategy.step(optimizer)
            optimizer.zero_grad()
            reference.step()
        self._assert_close(strategy.state(model), reference.model.state_dict())

    def check_clip_norm(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = _Reference(strategy)
        _accumulate(strategy, model)
        true_norm = reference.backward()
        limit = true_norm.item() / 4
        strategy.unscale(optimizer)
        norm = strategy.clip_norm((p for p in model.parameters()), limit)
        torch.testing.assert_close(norm.cpu(), true_norm, rtol=self.rtol, atol=0)
        strategy.step(optimizer)
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), limit)
        reference.optimizer.step()
        self._assert_close(strategy.state(model), reference.model.state_dict())

    def check_clip_value(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = _Reference(strategy)
        _accumulate(strategy, model)
        reference.backward()
        strategy.unscale(optimizer)
        strategy.clip_value(model.parameters(), 0.01)
        torch.nn.utils.clip_grad_value_(reference.model.parameters(), 0.01)
        strategy.step(optimizer)
        reference.optimizer.step()
        self._assert_close(strategy.state(model), reference.model.state_dict())

    def check_step(self) -> None:
        strategy, model, optimizer = self._prepared()
        _accumulate(strategy, model)
        assert strategy.step(optimizer) == StepOutcome(True, None)

        def closure() -> float:
            optimizer.zero_grad()
            _accumulate(strategy, model)
            return 7.0

        outcome = strategy.step(optimizer, closure)
        assert outcome == StepOutcome(True, 7.0), outcome

    def check_skipped_step(self) -> None:
        strategy, model, optimizer = self._prepared(SkippingPrecision())
        before = _copied(strategy.state(model))
        _accumulate(strategy, model)
        assert not strategy.step(optimizer).ran
        self._assert_close(strategy.state(model), before)

    def check_save_and_load(self, folder: str) -> None:
        for safe in (True, False):
            strategy, model, optimizer = self._prepared(adam=True)
            _train(strategy, model, optimizer, steps=2)
            name = f"model_{int(safe)}"
            strategy.save_model(model, strategy.state(model), folder, name, safe=safe)
            strategy.save_optimizer(optimizer, folder, f"optimizer_{int(safe)}")
            barrier(strategy.world)
            expected = _train(strategy, model, optimizer, steps=2)

            again, other, other_optimizer = self._prepared(adam=True, seed=99)
            again.load_model(other, folder, name)
            again.load_optimizer(other_optimizer, folder, f"optimizer_{int(safe)}")
            assert _train(again, other, other_optimizer, steps=2) == expected
            file = f"{name}.safetensors" if safe else f"pytorch_{name}.bin"
            assert Path(folder, file).is_file(), file

    def check_tied_weights(self, folder: str) -> None:
        strategy = self.strategy()
        (model,) = strategy.prepare(Bundle(models=[_Tied()])).models
        expected = _copied(strategy.state(model))
        strategy.save_model(model, strategy.state(model), folder, "model")
        barrier(strategy.world)
        own = _Tied()
        (other,) = strategy.prepare(Bundle(models=[own])).models
        with torch.no_grad():
            own.first.weight.zero_()
        strategy.load_model(other, folder, "model")
        self._assert_close(strategy.state(other), expected)
        assert own.first.weight is own.second.weight

    def check_unwrap(self) -> None:
        strategy = self.strategy()
        original = _model()
        names = list(original.state_dict())
        (model,) = strategy.prepare(Bundle(models=[original])).models
        assert strategy.unwrap(model) is original
        assert strategy.unwrap(original) is original
        assert list(strategy.state(model)) == names
        strategy.precision.unwrap(original)
        assert type(original) is nn.Sequential
        strategy.close()

    def check_frozen_and_evaluation(self) -> None:
        strategy = self.strategy()
        frozen = _model().requires_grad_(False)
        (prepared,) = strategy.prepare(Bundle(models=[frozen])).models
        (judge,) = strategy.prepare(Bundle(models=[_model()], evaluation=True)).models
        x, _ = _share(strategy.world)
        assert prepared(x).shape == judge(x).shape
        with strategy.without_sync(judge):
            assert judge(x).dtype == torch.float64

    def check_same_start(self) -> None:
        strategy = self.strategy()
        (model,) = strategy.prepare(Bundle(models=[_model(seed=strategy.world.rank)])).models
        self._assert_close(strategy.state(model), _model(seed=0).state_dict())

    def check_sync(self) -> None:
        strategy, model, optimizer = self._prepared()
        x, y = _share(strategy.world)
        with strategy.without_sync(model):
            loss = mse_loss(model(x), y)
            strategy.backward(loss)
        alone = _gradients_of_all_ranks(strategy, model)
        assert strategy.world.size == 1 or not torch.allclose(alone[0], alone[-1])
        optimizer.zero_grad()
        with strategy.without_sync(model):
            loss = mse_loss(model(x), y)
            with strategy.sync_next_backward(model):
                strategy.backward(loss)
        together = _gradients_of_all_ranks(strategy, model)
        self._assert_close({"gradient": together[0]}, {"gradient": alone.mean(0)})
        self._assert_close({"gradient": together[0]}, {"gradient": together[-1]})

    def _prepared(
        self, precision: Precision | None = None, *, adam: bool = False, seed: int = 0
    ) -> tuple[Strategy, nn.Module, Any]:
        strategy = self.strategy(precision)
        model = _model(seed)
        optimizer: Any = (
            torch.optim.Adam(model.parameters()) if adam else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        got = strategy.prepare(Bundle(models=[model], optimizers=[optimizer]))
        return strategy, got.models[0], got.optimizers[0]

    def _assert_close(self, got: Any, expected: Any) -> None:
        assert list(got) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name].cpu(),
                value.cpu(),
                rtol=self.rtol,
                atol=self.rtol,
                msg=functools.partial("{}: {}".format, name),
            )


class _Reference:
    """Plain torch in this process, on the batches of all ranks at once."""

    def __init__(self, strategy: Strategy) -> None:
        self.model = _model()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        shares = [_share_of(rank) for rank in range(strategy.world.size)]
        self.x, self.y = (torch.cat(part) for part in zip(*shares, strict=True))

    def backward(self) -> Tensor:
        """The gradients of the whole batch; their norm."""
        self.optimizer.zero_grad()
        mse_loss(self.model(self.x), self.y).backward()
        return torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(_FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    return model


def _share_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(_PER_RANK, _FEATURES, generator=generator, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


def _share(world: World) -> tuple[Tensor, Tensor]:
    x, y = _share_of(world.rank)
    return x.to(world.device), y.to(world.device)


def _accumulate(strategy: Strategy, model: nn.Module) -> float:
    """Forward and backward of this rank's share in two micro-batches, the first without synchronising; the sum of the losses."""
    x, y = _share(strategy.world)
    total = 0.0
    for i, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        with strategy.without_sync(model) if i == 0 else nullcontext():
            loss = mse_loss(model(part), target)
            strategy.backward(loss, divisor=2)
        total += loss.item()
    return total


def _train(strategy: Strategy, model: nn.Module, optimizer: Any, *, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(_accumulate(strategy, model))
        strategy.step(optimizer)
        optimizer.zero_grad()
    return losses


def _gradients_of_all_ranks(strategy: Strategy, model: nn.Module) -> Tensor:
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return strategy.world.comm.all_gather(flat)


def _copied(state: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def _ids(parameters: Any) -> list[int]:
    return [id(p) for p in parameters]
