"""One scale per iteration, whatever order optimizers step in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from acc_ops.fake_accelerator import fake_accelerator
from acc_ops.testing import run_threads
from acc_ops.world import current_world, use_world
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.scaler import StepScaler, get_grad_scaler


def scaler(**options: Any) -> StepScaler:
    return StepScaler("cpu", **{"init_scale": 64.0, "growth_interval": 1, **options})


def weight_and_optimizer(**options: Any) -> tuple[torch.Tensor, Any]:
    weight = torch.ones(2, requires_grad=True)
    return weight, torch.optim.SGD([weight], lr=1.0, **options)


def test_two_optimizers_that_step_in_turn_see_the_same_scale() -> None:
    # the scale grows after every step here: with an update after the first step the second would be unscaled by twice its scale
    scale = scaler()
    (a, first), (b, second) = weight_and_optimizer(), weight_and_optimizer()
    for _ in range(3):
        scale.scale((a * 0.25).sum() + (b * 0.25).sum()).backward()
        assert scale.step_and_tell(first).ran
        assert scale.step_and_tell(second).ran
        first.zero_grad()
        second.zero_grad()
    assert a.tolist() == b.tolist() == [0.25, 0.25]
    assert scale.get_scale() == 64 * 2**3


def test_an_overflow_of_one_optimizer_does_not_touch_the_other() -> None:
    scale = scaler()
    (a, first), (b, second) = weight_and_optimizer(), weight_and_optimizer()
    scale.scale((a * float("inf")).sum() + (b * 0.5).sum()).backward()
    assert scale.step_and_tell(first) == StepOutcome(False, None)
    assert scale.step_and_tell(second).ran
    assert a.tolist() == [1, 1]
    assert b.tolist() == [0.5, 0.5]
    assert scale.get_scale() == 32


def test_the_scale_is_not_changed_between_micro_batches() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    for _ in range(4):
        scale.scale((a * 0.125).sum()).backward()
    assert scale.get_scale() == 64
    scale.step_and_tell(optimizer)
    assert a.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_told_for_fused_kernels_too(fused: bool) -> None:
    scale = scaler()
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
    scale.scale((weight * float("inf")).sum()).backward()
    assert not scale.step_and_tell(optimizer).ran
    assert weight.tolist() == [1, 1]
    optimizer.zero_grad()
    scale.scale(weight.sum()).backward()
    assert scale.step_and_tell(optimizer).ran
    assert weight[0] < 1


def test_unscaling_twice_divides_once() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    scale.scale((a * 3).sum()).backward()
    scale.unscale_once(optimizer)
    scale.unscale_once(optimizer)
    assert a.grad.tolist() == [3, 3]
    scale.step_and_tell(optimizer)
    scale.unscale_once(optimizer)  # after the step: looking at gradients again is no error
    assert a.grad.tolist() == [3, 3]


def test_a_window_dropped_after_an_overflow_lowers_the_scale() -> None:
    scale = scaler(growth_interval=100)
    a, optimizer = weight_and_optimizer()
    scale.scale((a * float("inf")).sum()).backward()
    scale.unscale_once(optimizer)
    optimizer.zero_grad()  # the loop saw an infinite norm and went on without stepping
    scale.scale((a * 3).sum()).backward()
    scale.unscale_once(optimizer)
    assert a.grad.tolist() == [3, 3]
    assert scale.step_and_tell(optimizer).ran
    assert scale.get_scale() == 32


def test_a_backward_onto_unscaled_gradients_is_refused_when_it_would_mix_scales() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    scale.scale(a.sum()).backward()
    scale.unscale_once(optimizer)
    scale.scale(a.sum()).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        scale.unscale_once(optimizer)


def test_a_step_with_mixed_gradients_is_refused_too() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    scale.scale(a.sum()).backward()
    scale.unscale_once(optimizer)
    scale.scale(a.sum()).backward()
    with pytest.raises(RuntimeError, match=r"clip only `if accelerator.sync_gradients`"):
        scale.step_and_tell(optimizer)


def test_float16_weights_are_refused_with_a_way_out() -> None:
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for look in (StepScaler.unscale_once, StepScaler.step_and_tell):
        scale = scaler()
        scale.scale(weight.sum()).backward()
        with pytest.raises(ValueError, match=r"SGD trains weights that are float16 .*model.float\(\)"):
            look(scale, optimizer)


def test_clipping_again_after_the_backward_of_another() -> None:
    scale = scaler()
    (a, first), (b, second) = weight_and_optimizer(), weight_and_optimizer()
    scale.scale((a * 0.5).sum()).backward()
    scale.unscale_once(first)
    scale.scale((b * 0.5).sum()).backward()
    for optimizer in (first, second):  # clip_grad_norm_ unscales all
        scale.unscale_once(optimizer)
    assert a.grad is not None
    assert a.grad.tolist() == [0.5, 0.5]
    assert scale.step_and_tell(first).ran
    assert scale.step_and_tell(second).ran


def test_clip_one_then_backward_of_another_then_step_both() -> None:
    scale = scaler()
    (a, first), (b, second) = weight_and_optimizer(), weight_and_optimizer()
    scale.scale((a * 0.5).sum()).backward()
    scale.unscale_once(first)
    scale.scale((b * 0.5).sum()).backward()
    scale.unscale_once(second)
    scale.step_and_tell(first)
    scale.step_and_tell(second)
    assert a.tolist() == b.tolist() == [0.5, 0.5]
    assert scale.get_scale() == 128


def test_an_optimizer_without_gradients_steps_without_complaint() -> None:
    scale = scaler()
    _, optimizer = weight_and_optimizer()
    scale.unscale_once(optimizer)
    assert scale.step_and_tell(optimizer) == StepOutcome(True, None)
    assert scale.get_scale() == 64


def test_a_disabled_scaler_only_steps() -> None:
    scale = scaler(enabled=False)
    a, optimizer = weight_and_optimizer()
    scale.scale(a.sum()).backward()
    scale.unscale_once(optimizer)
    assert scale.step_and_tell(optimizer).ran
    assert a.tolist() == [0, 0]


def test_the_saved_state_is_that_of_the_next_backward() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    scale.scale(a.sum()).backward()
    scale.step_and_tell(optimizer)
    assert scale.state_dict()["scale"] == 128
    other = scaler()
    other.load_state_dict(scale.state_dict())
    assert other.get_scale() == 128


def test_an_overflow_before_loading_does_not_lower_the_loaded_scale() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    scale.scale((a * float("inf")).sum()).backward()
    scale.unscale_once(optimizer)
    optimizer.zero_grad()
    scale.load_state_dict(scaler(init_scale=128.0).state_dict())
    assert scale.get_scale() == 128
    scale.scale((a * 0.5).sum()).backward()
    assert scale.step_and_tell(optimizer).ran


def test_the_users_own_loop_with_torchs_methods_works() -> None:
    scale = scaler()
    a, optimizer = weight_and_optimizer()
    for _ in range(2):
        scale.scale((a * 0.25).sum()).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
    assert a.tolist() == [0.5, 0.5]
    assert scale.get_scale() == 256
    scale.update(2.0)
    assert scale.get_scale() == 2


def test_get_grad_scaler_is_torchs_for_this_device() -> None:
    got = get_grad_scaler(init_scale=4.0)
    assert type(got) is torch.amp.GradScaler
    assert got.scale(torch.ones(())).item() == 4
    sharded = get_grad_scaler("FSDP", init_scale=2.0)
    assert type(sharded).__name__ == "ShardedGradScaler"


def test_no_grad_scaler_for_a_kind_of_device_that_has_none() -> None:
    with (
        fake_accelerator(grad_scaler=False) as fake,
        use_world(dataclasses.replace(current_world(), device=fake.device)),
        pytest.raises(ValueError, match=f"no gradient scaler for {fake.kind}"),
    ):
        get_grad_scaler()


def test_ranks_that_agree_skip_together_also_one_without_a_gradient() -> None:
    def train() -> tuple[list[bool], float]:
        world = current_world()
        scaler = StepScaler("cpu", init_scale=8.0)
        scaler.agree = lambda flag: world.comm.all_reduce(flag, "max")
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer: Any = torch.optim.SGD([weight], lr=0.1)
        assert scaler.step_and_tell(optimizer).ran  # nothing was scaled yet
        ran = []
        for factor in (1.0, float("inf"), 1.0):
            loss = (weight * (factor if world.rank == 0 else 1.0)).sum()
            scaler.scale(loss).backward()
            if world.rank == 2:
                weight.grad = None  # it has no shard of what overflowed
            ran.append(scaler.step_and_tell(optimizer).ran)
            optimizer.zero_grad()
        return ran, scaler.get_scale()

    assert run_threads(3, train) == [([True, False, True], 4.0)] * 3
