"""What every strategy must keep, as a test class; `acc_plugins.testing` is its front door, and `contract_base.py` tells what to override."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acc_ops.collectives import barrier
from acc_ops.environment import parse_choice_from_env
from acc_ops.optional import is_available
from acc_plugins.options.kwargs import GradScalerKwargs
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.contract_samples import copied, doubles
from acc_plugins.strategies.contract_windows import WindowContract
from acc_plugins.strategies.registry import choose_precision
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.support import record_run

_STEPS = 10
_NEAR = 0.05  # of a loss in low precision, against float32


class SkippingPrecision(Precision):
    """A precision whose every step is skipped, as an overflow skips one."""

    def step(self, optimizer: Any, closure: Any = None) -> StepOutcome:  # noqa: ARG002
        return StepOutcome(False, None)


class StrategyContract(WindowContract):
    """Prepare keeps order; two micro-batches equal one big batch; ten steps equal plain torch's, losses and gradients; clip returns the true
    norm; a skipped step says so; save, load and go on as if nothing had happened, also under another strategy; unwrap gives the
    original back. All of it in float64, against plain torch on the whole batch. Then the same training in every precision."""

    def test_prepare_keeps_the_order_and_every_parameter_its_optimizer(self) -> None:
        self.on_ranks("check_prepare")

    def test_two_micro_batches_equal_one_big_batch(self) -> None:
        self.on_ranks("check_micro_batches")

    def test_ten_steps_equal_plain_torch_in_float64_losses_and_gradients(self) -> None:
        self.on_ranks("check_ten_steps")

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

    def test_a_run_that_another_strategy_began_goes_on(self, tmp_path: Path) -> None:
        self.on_ranks("check_save_and_leave", str(tmp_path))
        self.on_ranks("check_take_over", str(tmp_path))

    def test_unwrap_gives_the_original_back_and_state_has_its_names(self) -> None:
        self.on_ranks("check_unwrap")

    def test_models_that_train_nothing_are_prepared_too(self) -> None:
        self.on_ranks("check_frozen_and_evaluation")

    def test_every_rank_trains_rank_0s_weights(self) -> None:
        self.on_ranks("check_same_start")

    def test_every_precision_trains_near_float32_and_skips_overflows_on_all_ranks(self) -> None:
        self.on_ranks("check_precisions")

    def check_prepare(self) -> None:
        strategy = self.strategy()
        models = [self.model(seed) for seed in range(3)]
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
        reference = self._reference()
        for _ in range(3):
            self._accumulate(strategy, model)
            strategy.step(optimizer)
            optimizer.zero_grad()
            reference.step()
        self._assert_state(strategy, model, reference.model.state_dict())

    def check_ten_steps(self) -> None:
        strategy, model, optimizer = self._prepared(adam=True)
        reference = self._reference(adam=True)
        for step in range(_STEPS):
            got = self._accumulate(strategy, model)
            expected = reference.backward()
            if step == 0:
                self._assert_close(self.whole_gradients(strategy, model), reference.gradients())
            strategy.step(optimizer)
            reference.optimizer.step()
            optimizer.zero_grad()
            self._assert_close({"loss": doubles(got)}, {"loss": expected})

    def check_clip_norm(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        self._accumulate(strategy, model)
        reference.backward()
        true_norm = reference.norm()
        limit = true_norm.item() / 4
        strategy.unscale(optimizer)
        norm = strategy.clip_norm((p for p in model.parameters()), limit)
        torch.testing.assert_close(norm.cpu(), true_norm, rtol=self.rtol, atol=0)
        strategy.step(optimizer)
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), limit)
        reference.optimizer.step()
        self._assert_state(strategy, model, reference.model.state_dict())

    def check_clip_value(self) -> None:
        strategy, model, optimizer = self._prepared()
        reference = self._reference()
        self._accumulate(strategy, model)
        reference.backward()
        strategy.unscale(optimizer)
        strategy.clip_value(model.parameters(), 0.01)
        torch.nn.utils.clip_grad_value_(reference.model.parameters(), 0.01)
        strategy.step(optimizer)
        reference.optimizer.step()
        self._assert_state(strategy, model, reference.model.state_dict())

    def check_step(self) -> None:
        strategy, model, optimizer = self._prepared()
        self._accumulate(strategy, model)
        assert strategy.step(optimizer) == StepOutcome(True, None)

        def closure() -> float:
            optimizer.zero_grad()
            self._accumulate(strategy, model)
            return 7.0

        outcome = strategy.step(optimizer, closure)
        assert outcome == StepOutcome(True, 7.0), outcome

    def check_skipped_step(self) -> None:
        strategy, model, optimizer = self._prepared(SkippingPrecision())
        before = copied(strategy.state(model))
        self._accumulate(strategy, model)
        assert not strategy.step(optimizer).ran
        self._assert_state(strategy, model, before)

    def check_save_and_load(self, folder: str) -> None:
        for safe in (True, False):
            strategy, model, optimizer = self._prepared(adam=True)
            self._train(strategy, model, optimizer, steps=2)
            name, optimizer_name = f"model_{int(safe)}", f"optimizer_{int(safe)}"
            self._save(strategy, model, optimizer, folder, (name, optimizer_name), safe=safe)
            expected = self._train(strategy, model, optimizer, steps=2)

            again, other, other_optimizer = self._prepared(adam=True, seed=99)
            again.load_model(other, folder, name)
            again.load_optimizer(other_optimizer, folder, optimizer_name)
            assert self._train(again, other, other_optimizer, steps=2) == expected
            file = f"{name}.safetensors" if safe else f"pytorch_{name}.bin"
            assert not self.whole_files or Path(folder, file).is_file(), file

    def check_tied_weights(self, folder: str) -> None:
        strategy = self.strategy()
        (model,) = strategy.prepare(Bundle(models=[self.tied_model()])).models
        expected = copied(strategy.state(model))
        strategy.save_model(model, strategy.state_for_hooks(model), folder, "model")
        barrier(strategy.world)
        own = self.tied_model()
        (other,) = strategy.prepare(Bundle(models=[own])).models
        with torch.no_grad():
            for p in own.parameters():
                p.zero_()
        strategy.load_model(other, folder, "model")
        self._assert_state(strategy, other, expected)
        assert len(list(strategy.unwrap(other).parameters())) == 1

    def check_save_and_leave(self, folder: str) -> None:
        """Train, save, and note in `expected.json` how the run goes on, for `check_take_over` of this contract or of another strategy's."""
        strategy, model, optimizer = self._prepared(adam=True)
        self._train(strategy, model, optimizer, steps=3)
        self._save(strategy, model, optimizer, folder, ("model", "optimizer"))
        losses = self._train(strategy, model, optimizer, steps=3)
        if strategy.world.is_main:
            Path(folder, "expected.json").write_text(json.dumps(losses))
        barrier(strategy.world)

    def check_take_over(self, folder: str) -> None:
        """Load what `check_save_and_leave` of any contract left in `folder`, optimizer too, and go on as that run did."""
        strategy, model, optimizer = self._prepared(adam=True, seed=99)
        strategy.load_model(model, folder, "model")
        strategy.load_optimizer(optimizer, folder, "optimizer")
        losses = self._train(strategy, model, optimizer, steps=3)
        expected = json.loads(Path(folder, "expected.json").read_text())
        self._assert_close({"losses": doubles(losses)}, {"losses": doubles(expected)})

    def check_unwrap(self) -> None:
        strategy = self.strategy()
        original = self.model()
        names = list(original.state_dict())
        (model,) = strategy.prepare(Bundle(models=[original])).models
        assert strategy.unwrap(model) is original
        assert strategy.unwrap(original) is original
        state = strategy.state(model)
        assert list(state) == names or not strategy.world.is_main
        strategy.precision.unwrap(original)
        assert isinstance(original, nn.Sequential)
        strategy.close()

    def check_frozen_and_evaluation(self) -> None:
        strategy = self.strategy()
        frozen = self.model().requires_grad_(False)
        (prepared,) = strategy.prepare(Bundle(models=[frozen])).models
        (judge,) = strategy.prepare(Bundle(models=[self.model()], evaluation=True)).models
        x, _ = self._share(strategy.world)
        with torch.no_grad():
            assert prepared(x).shape == judge(x).shape
            with strategy.without_sync(judge):
                assert judge(x).dtype == torch.float64

    def check_same_start(self) -> None:
        strategy = self.strategy()
        (model,) = strategy.prepare(Bundle(models=[self.model(seed=strategy.world.rank)])).models
        self._assert_state(strategy, model, self.model(seed=0).state_dict())

    def check_precisions(self) -> None:
        for name in self.precisions:
            if name != "fp8" or is_available("torchao"):
                self.check_precision(name)

    def check_precision(self, name: str) -> None:
        """Ten steps come near float32's; what the model returns, its weights and gradients are float32; an overflow on one rank skips on all."""
        scaling = (
            GradScalerKwargs(init_scale=1024.0) if name == "fp16" else None
        )  # the default overflows at first
        precision = choose_precision(name, self.device, scaler_options=scaling)
        strategy, model, optimizer = self._prepared(precision, dtype=torch.float32)
        reference = self._reference(dtype=torch.float32)
        x, _ = self._share(strategy.world, torch.float32)
        losses, expected = [], []
        for _ in range(_STEPS):
            assert model(x).dtype == torch.float32
            losses.append(self._accumulate(strategy, model, torch.float32))
            strategy.unscale(optimizer)
            expected.append(reference.backward().item())
            self._assert_all_float32(optimizer)
            outcome = strategy.step(optimizer)
            assert outcome.ran
            reference.optimizer.step()
            optimizer.zero_grad()
        near = 1e-4 if name == "no" else _NEAR
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=near, atol=near)
        assert losses[-1] < losses[0]
        if strategy.precision.scaler is not None:
            self._overflow(strategy, model, optimizer, strategy.precision.scaler)
        record = parse_choice_from_env("ACC_RECORD_RUNS", "")
        if record and strategy.world.is_main:
            record_run(record, strategy.name, name, self.device, torch.__version__.partition("+")[0])

    def _overflow(self, strategy: Strategy, model: nn.Module, optimizer: Any, scaler: Any) -> None:
        before, scale = copied(strategy.state(model)), scaler.get_scale()
        x, _ = self._share(strategy.world, torch.float32)
        index, _ = self.data_place(strategy.world)
        strategy.backward(model(x).sum() * (float("inf") if index == 0 else 1.0))
        assert strategy.step(optimizer) == StepOutcome(False, None)
        optimizer.zero_grad()
        self._assert_state(strategy, model, before)
        scales = strategy.world.comm.all_gather_object(scaler.get_scale())
        assert scales == [scale * scaler.get_backoff_factor()] * strategy.world.size, scales

    def _assert_all_float32(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert p.dtype == torch.float32
                assert p.grad is None or p.grad.dtype == torch.float32


def _ids(parameters: Iterable[Any]) -> list[int]:
    return [id(p) for p in parameters]
