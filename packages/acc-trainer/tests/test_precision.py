"""Low precision as a whole loop sees it, with torch's own autocast and GradScaler as the judge."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from acc_plugins.options.kwargs import GradScalerKwargs
from acc_trainer import Accelerator

torch.set_num_threads(1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 8


def parts():
    torch.manual_seed(0)
    body, head = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh()), torch.nn.Linear(8, 1)
    one = torch.optim.AdamW(body.parameters(), lr=0.01)
    return body, head, one, torch.optim.SGD(head.parameters(), lr=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, width, generator=generator) for width in (3, 1)] for _ in range(STEPS)]


def weights(*models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def overflow(index):
    """What one loss is multiplied by: an infinity in the middle of the run."""
    return float("inf") if index == 3 else 1.0


def plain(mixed_precision, window, clip):
    body, head, *optimizers = parts()
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=256.0, growth_interval=2, enabled=mixed_precision == "fp16"
    )
    everything = [*body.parameters(), *head.parameters()]
    for index, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", dtype=DTYPES[mixed_precision]):
            features = body(x)
        with torch.autocast("cpu", dtype=DTYPES[mixed_precision]):
            out = head(features.float())
        loss = mse_loss(out.float(), y) * (overflow(index) if mixed_precision == "fp16" else 1.0)
        scaler.scale(loss / window).backward()
        if (index + 1) % window:
            continue
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(everything, 0.05)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(everything, 0.01)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return weights(body, head), scaler.get_scale()


def prepared(mixed_precision, window, clip, unscale):
    handlers = [GradScalerKwargs(init_scale=256.0, growth_interval=2)] if mixed_precision == "fp16" else []
    accelerator = Accelerator(
        mixed_precision=mixed_precision, gradient_accumulation_steps=window, kwargs_handlers=handlers
    )
    body, head, *optimizers = accelerator.prepare(*parts())
    everything = [*body.parameters(), *head.parameters()]
    skipped = []
    for index, (x, y) in enumerate(batches()):
        with accelerator.accumulate(body, head):
            loss = mse_loss(head(body(x)), y)
            accelerator.backward(loss * (overflow(index) if mixed_precision == "fp16" else 1.0))
            if accelerator.sync_gradients:
                for _ in range(unscale):
                    accelerator.unscale_gradients()
                if clip == "norm":
                    accelerator.clip_grad_norm_(everything, 0.05)
                elif clip == "value":
                    accelerator.clip_grad_value_(everything, 0.01)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
    return weights(body, head), scale, skipped


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("unscale", [0, 2])
def test_a_loop_is_torchs_own_bit_for_bit(mixed_precision, window, clip, unscale):
    ours, scale, skipped = prepared(mixed_precision, window, clip, unscale)
    expected, its_scale = plain(mixed_precision, window, clip)
    assert torch.equal(ours, expected)
    assert scale == its_scale
    assert skipped.count(True) == (mixed_precision == "fp16")


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_gradients_of_several_dtypes_are_clipped_together(mixed_precision):
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    low, high = torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 1)
    low, high = accelerator.prepare(low, high)
    everything = [*low.parameters(), *high.parameters()]
    for _ in range(2):
        with accelerator.accumulate(low, high):
            middle = low(torch.randn(4, 3).bfloat16())
            accelerator.backward(high(middle.float()).square().sum())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in everything]
    for twin, p in zip(twins, everything, strict=True):
        twin.grad = p.grad.clone()
    norm = accelerator.clip_grad_norm_(iter(everything), 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(twins, 0.5))
    accelerator.clip_grad_value_(everything, 0.01)
    torch.nn.utils.clip_grad_value_(twins, 0.01)
    for twin, p in zip(twins, everything, strict=True):
        assert p.grad.dtype is p.dtype
        assert torch.equal(twin.grad, p.grad)


def test_float16_weights_are_an_error_when_they_are_trained_and_none_when_they_are_used():
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(2, 1).half()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    out = model(torch.ones(1, 2))
    assert out.dtype is torch.float32
    accelerator.backward(out.sum())
    with pytest.raises(ValueError, match=r"model.float\(\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"model.float\(\)"):
        optimizer.step()


def scaled(prepare_optimizer):
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer) if prepare_optimizer else optimizer
    accelerator.backward(model(torch.ones(2, 3)).sum())
    return accelerator, model, optimizer


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_gradients_that_stay_scaled_is_said_with_the_remedy(clip):
    accelerator, model, _ = scaled(prepare_optimizer=False)
    with pytest.warns(
        UserWarning, match=r"1 of the 1 parameters .* no prepared optimizer.* give prepare\(\)"
    ):
        getattr(accelerator, clip)(model.parameters(), 1.0)


@pytest.mark.parametrize("prepare_optimizer", [True, False])
@pytest.mark.filterwarnings("error")
def test_clipping_is_quiet_where_gradients_have_their_true_size(prepare_optimizer):
    accelerator, model, optimizer = scaled(prepare_optimizer)
    if not prepare_optimizer:
        accelerator.unscale_gradients(optimizer)
    assert accelerator.clip_grad_norm_(model, 1.0).item() == pytest.approx(2 * 3**0.5)


def test_clipping_without_gradients_does_nothing():
    accelerator, model = Accelerator(), torch.nn.Linear(1, 1)
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.clip_grad_value_([], 1.0)
    assert model.weight.grad is None


def test_a_model_of_a_low_precision_run_is_float32_in_a_later_one():
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    expected = model(x)
    first = Accelerator(mixed_precision="bf16")
    assert not torch.equal(first.prepare(model)(x), expected)
    first.end_training()
    assert torch.equal(Accelerator(mixed_precision="no").prepare(model)(x), expected)
