"""The contracts catch strategies and precisions that break them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.amp import BFloat16Autocast, Float16Autocast
from acc_plugins.precisions.precision import Precision
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Bundle, Strategy
from acc_plugins.testing import PrecisionContract, StrategyContract


class Reversing(Strategy):
    def prepare(self, bundle: Bundle) -> Bundle:
        got = super().prepare(bundle)
        got.models.reverse()
        return got


class NeverDividing(Strategy):
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)


class ClippingToOne(Strategy):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: float = 2.0) -> Tensor:
        return super().clip_norm(parameters, max_norm, norm_type) * 2


class Boasting(Strategy):
    def step(self, optimizer: Any, closure: Any = None) -> StepOutcome:
        return StepOutcome(True, super().step(optimizer, closure).result)


class Forgetting(Strategy):
    def load_optimizer(self, *args: Any, **kwargs: Any) -> None:
        pass


class HalfWeights(Strategy):
    def prepare(self, bundle: Bundle) -> Bundle:
        made = super().prepare(bundle)
        for model in made.models:
            model.bfloat16()
        return made


class KeepingWrapped(Strategy):
    def unwrap(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model)


class AlwaysSynchronising(ReplicatedStrategy):
    def without_sync(self, model: nn.Module, apart: bool = False) -> AbstractContextManager[Any]:
        return nullcontext()


class NeverExchanging(ReplicatedStrategy):
    def exchange_model(self, model: nn.Module) -> None:
        pass


class Keeping(ReplicatedStrategy):
    """Empties nothing but what an optimizer sees, as if it held gradients back in a place of its own."""

    def without_sync(self, model: nn.Module, apart: bool = False) -> AbstractContextManager[Any]:
        self.kept = model
        return super().without_sync(model, apart)

    def drop_held(self, optimizer: Any) -> None:
        for p in self.kept.parameters():
            p.grad = torch.ones_like(p)


class NeverSynchronising(ReplicatedStrategy):
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        Strategy.backward(self, loss, divisor=divisor, **kwargs)


@pytest.mark.parametrize(
    ("kind", "size", "broken"),
    [
        (Reversing, 1, "test_prepare_keeps_the_order_and_every_parameter_its_optimizer"),
        (NeverDividing, 1, "test_two_micro_batches_equal_one_big_batch"),
        (NeverSynchronising, 2, "test_ten_steps_equal_plain_torch_in_float64_losses_and_gradients"),
        (NeverExchanging, 2, "test_a_step_behind_a_window_that_was_broken_off_exchanges_what_it_held"),
        (Keeping, 2, "test_a_window_that_was_broken_off_and_emptied_leaves_nothing_behind"),
        (ClippingToOne, 1, "test_clip_norm_returns_the_true_norm_and_clips_to_it"),
        (Boasting, 1, "test_a_skipped_step_says_so"),
        (Forgetting, 1, "test_a_saved_and_loaded_run_goes_on_as_if_nothing_had_happened"),
        (Forgetting, 1, "test_a_run_that_another_strategy_began_goes_on"),
        (NeverDividing, 1, "test_ten_steps_equal_plain_torch_in_float64_losses_and_gradients"),
        (HalfWeights, 1, "test_every_precision_trains_near_float32_and_skips_overflows_on_all_ranks"),
        (KeepingWrapped, 1, "test_unwrap_gives_the_original_back_and_state_has_its_names"),
        (
            AlwaysSynchronising,
            2,
            "test_without_sync_keeps_gradients_on_their_rank_until_they_are_synchronised",
        ),
        (Strategy, 2, "test_every_rank_trains_rank_0s_weights"),
    ],
)
def test_a_broken_strategy_fails(kind: type[Strategy], size: int, broken: str, tmp_path: Path) -> None:
    class Contract(StrategyContract):
        def make_strategy(self, world: World, precision: Precision) -> Strategy:
            return kind(world, precision)

    Contract.size = size
    test: Callable[..., None] = getattr(Contract(), broken)
    with pytest.raises(Exception):  # noqa: B017  run_threads may wrap the assertion
        test(tmp_path) if inspect.signature(test).parameters else test()


def test_every_test_runs_on_a_rank_that_exists_already(tmp_path: Path) -> None:
    class Contract(StrategyContract):
        precisions = ("no",)

        def make_strategy(self, world: World, precision: Precision) -> Strategy:
            return Strategy(world, precision)

    ran = Contract().run_on_this_rank(str(tmp_path))
    assert ran == sorted(name for name in dir(StrategyContract) if name.startswith("test_"))

    class Broken(Contract):
        def make_strategy(self, world: World, precision: Precision) -> Strategy:
            return NeverDividing(world, precision)

    with pytest.raises(AssertionError):
        Broken().run_on_this_rank(str(tmp_path))


class HalfOutputs(BFloat16Autocast):
    def wrap(self, model: nn.Module) -> nn.Module:
        forward = type(model).forward

        class Half(type(model)):
            def forward(self, *args: Any) -> Any:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return forward(self, *args)

        model.__class__ = Half
        return model


class CyclicWrap(BFloat16Autocast):
    def wrap(self, model: nn.Module) -> nn.Module:
        model.forward = model.forward
        return model


class Silent(Float16Autocast):
    def step(self, optimizer: Any, closure: Any = None) -> StepOutcome:
        return StepOutcome(True, super().step(optimizer, closure).result)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (HalfOutputs, "test_outputs_are_float32_in_every_structure"),
        (HalfOutputs, "test_unwrap_restores_the_model_exactly"),
        (CyclicWrap, "test_a_wrapped_model_is_freed_without_the_garbage_collector"),
        (Silent, "test_a_step_that_overflowed_says_so_and_changes_nothing"),
    ],
)
def test_a_broken_precision_fails(kind: Any, broken: str) -> None:
    class Contract(PrecisionContract):
        def make_precision(self, **options: Any) -> Precision:
            return kind("cpu")

    with pytest.raises(AssertionError):
        getattr(Contract(), broken)()
