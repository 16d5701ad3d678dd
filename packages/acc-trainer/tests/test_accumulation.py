"""What accumulation means, with a plain torch loop as the judge: short windows, broken windows, several models, several Accelerators."""

from __future__ import annotations

import copy
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

torch.set_num_threads(1)
DRAWING = threading.Lock()  # ranks that are threads share torch's generator


def net(seed=0, inputs=3, outputs=1):
    with DRAWING:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(inputs, 4), torch.nn.Tanh(), torch.nn.Linear(4, outputs)
        return torch.nn.Sequential(*layers).double()


def samples(size):
    generator = torch.Generator().manual_seed(42)
    return TensorDataset(
        *(torch.randn(size, width, dtype=torch.float64, generator=generator) for width in (3, 1))
    )


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def close(one, other):
    return torch.allclose(one, other, rtol=0, atol=1e-12)


def train(accelerator, data, *, batch, epochs=1, clip=None, model=None, stop=None, losses=1):
    """A prepared loop; `losses` backwards for each micro-batch; `stop(epoch, index)` leaves an epoch early."""
    model = net() if model is None else model
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch)
    )
    for epoch in range(epochs):
        for index, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                for _ in range(losses):
                    accelerator.backward(mse_loss(model(x), y) / losses)
                if stop is not None and stop(epoch, index):
                    break
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model))


def plain(data, *, batch, window, epochs=1, clip=None, mean_of_short=True, skip_first=0):
    """Plain torch: each window is one batch, the mean of its micro-batches' losses (or, as specified, their sum over `window`)."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        batches = list(DataLoader(data, batch))
        for start in range(skip_first if epoch == 0 else 0, len(batches), window):
            group = batches[start : start + window]
            losses = [mse_loss(model(x), y) for x, y in group]
            (sum(losses) / (len(group) if mean_of_short else window)).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def averaging(window):
    return GradientAccumulationPlugin(num_steps=window, average_short_window=True)


@settings(max_examples=40)
@given(
    batches=st.integers(1, 7),
    window=st.integers(1, 5),
    clip=st.sampled_from([None, 0.05]),
    losses=st.integers(1, 2),
    exact=st.booleans(),
)
def test_n_micro_batches_are_one_batch_n_times_as_large(batches, window, clip, losses, exact):
    data = samples(2 * batches)
    options = {"gradient_accumulation_plugin": averaging(window)} if exact else {}
    accelerator = Accelerator(**(options or {"gradient_accumulation_steps": window}))
    ours = train(accelerator, data, batch=2, epochs=2, clip=clip, losses=losses)
    expected = plain(data, batch=2, window=window, epochs=2, clip=clip, mean_of_short=exact)
    assert close(ours, expected)
    if batches % window == 0 or exact:  # windows of micro-batches are then batches of joined samples
        assert close(ours, plain(data, batch=2 * window, window=1, epochs=2, clip=clip))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_short_window_is_averaged_on_every_rank(ranks):
    data = samples(2 * ranks * 5)

    def work():
        accelerator = Accelerator(gradient_accumulation_plugin=averaging(3))
        return train(accelerator, data, batch=2, epochs=2, clip=0.05)

    expected = plain(data, batch=2 * ranks, window=3, epochs=2, clip=0.05)
    assert all(close(ours, expected) for ours in run_threads(ranks, work))


def test_a_short_window_that_nobody_can_average_is_said():
    accelerator = Accelerator(gradient_accumulation_plugin=averaging(3))
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(2, 1)))

    def loop():
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())

    with pytest.warns(UserWarning, match=r"no prepared optimizer .* of 2 micro-batches.* give prepare\(\)"):
        loop()


def test_a_short_window_is_averaged_in_fp16_too():
    data = TensorDataset(*(tensor.float() for tensor in samples(4).tensors))
    start = weights(net().float())

    def moved(mixed_precision):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_plugin=averaging(4))
        return train(accelerator, data, batch=2, model=net().float()) - start

    low, full = moved("fp16"), moved("no")
    assert (low - full).norm() < 0.02 * full.norm()  # by 4 instead of 2, it would be half as far


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_window_left_by_break_leaves_nothing_behind(at):
    """Wherever the loop is left, before the step: also in the last micro-batch of a window (at=1)."""
    data = samples(12)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    ours = train(accelerator, data, batch=2, epochs=2, stop=lambda epoch, index: (epoch, index) == (0, at))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(data, 2))
    whole = [batches[:2]] if at == 2 else []
    for group in [*whole, batches[:2], batches[2:4], batches[4:]]:
        (sum(mse_loss(model(x), y) for x, y in group) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert close(ours, weights(model))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("prepared", [True, False])
def test_a_window_left_by_an_exception_leaves_nothing_behind(at, prepared):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, batches = net(), list(DataLoader(samples(8), 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(DataLoader(samples(8), 2)) if prepared else batches

    def epoch(fail_at):
        for index, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                if index == fail_at:
                    raise RuntimeError("out of memory")
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="out of memory"):
        epoch(at)
    assert accelerator.sync_gradients  # a step from here on is a step
    epoch(None)
    assert close(weights(model), plain(samples(8), batch=2, window=2))


def test_a_micro_batch_that_fails_inside_the_loop_is_lost_alone():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = net()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(6), 2)
    )
    twin = copy.deepcopy(model)
    for index, (x, y) in enumerate(loader):
        try:
            with accelerator.accumulate(model):
                if index == 1:
                    raise ValueError("a bad sample")
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        except ValueError:
            continue
    first, _, last = DataLoader(samples(6), 2)
    (sum(mse_loss(twin(x), y) for x, y in (first, last)) / 3).backward()
    with torch.no_grad():
        for p in twin.parameters():
            p -= 0.1 * p.grad
    assert close(weights(model), weights(twin))


@pytest.mark.parametrize("prepared", [True, False])
def test_an_evaluation_left_early_between_micro_batches_breaks_no_window(prepared):
    """Beside a training loop over the user's own batches, or between the epochs of windows that go on over the end of a loader."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, evaluation = net(), accelerator.prepare(DataLoader(samples(4), 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train = DataLoader(samples(4), 2)
    train = accelerator.prepare(train) if prepared else list(train)
    for _ in range(2):
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        for _ in evaluation:
            break
    assert close(weights(model), plain(samples(4), batch=4, window=1))


def test_the_loss_after_a_short_window_is_divided_as_before():
    accelerator = Accelerator(gradient_accumulation_plugin=averaging(4))
    train(accelerator, samples(6), batch=2)
    parameter = torch.nn.Parameter(torch.ones(()))
    accelerator.backward(parameter * 1)
    assert parameter.grad.item() == 0.25


def gan_parts():
    maker, judge = net(1, inputs=2, outputs=3), net(2)
    return maker, judge, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge))


def gan_losses(maker, judge, real, noise):
    """The judge's loss (two forwards of it, real and made samples) and the maker's, through the judge."""
    return (
        lambda: judge(real).square().mean() + (judge(maker(noise).detach()) - 1).square().mean(),
        lambda: judge(maker(noise)).square().mean(),
    )


def gan_noise(steps, batch):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(steps, batch, 2, dtype=torch.float64, generator=generator)


def plain_gan(window, data, batch):
    maker, judge, one, two = gan_parts()
    loader = DataLoader(data, batch)
    for index, ((real, _), noise) in enumerate(zip(loader, gan_noise(len(loader), batch), strict=True)):
        for optimizer, loss in zip((two, one), gan_losses(maker, judge, real, noise), strict=True):
            owned = optimizer.param_groups[0]["params"]
            for p, gradient in zip(owned, torch.autograd.grad(loss() / window, owned), strict=True):
                p.grad = gradient if p.grad is None else p.grad + gradient
            if (index + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([weights(maker), weights(judge)])


def prepared_gan(window, data, batch):
    accelerator = Accelerator(gradient_accumulation_steps=window)
    rank, size = accelerator.process_index, accelerator.num_processes
    maker, judge, one, two, loader = accelerator.prepare(*gan_parts(), DataLoader(data, batch))
    for (real, _), noise in zip(loader, gan_noise(len(loader), size * batch), strict=True):
        mine = noise[rank * batch : (rank + 1) * batch]
        with accelerator.accumulate(maker, judge):
            for optimizer, frozen, loss in zip(
                (two, one), (maker, judge), gan_losses(maker, judge, real, mine), strict=True
            ):
                frozen.requires_grad_(False)
                accelerator.backward(loss())
                frozen.requires_grad_(True)
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([weights(accelerator.unwrap_model(model)) for model in (maker, judge)])


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gan_trains_as_it_does_in_plain_torch(window, ranks):
    data = samples(16)
    expected = plain_gan(window, data, 2 * ranks)
    assert all(close(ours, expected) for ours in run_threads(ranks, lambda: prepared_gan(window, data, 2)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_distillation_trains_the_student_and_leaves_the_teacher(ranks):
    data = samples(24)

    def work():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        teacher, student = net(5).requires_grad_(False), net()
        before = weights(teacher)
        teacher, student, optimizer, loader = accelerator.prepare(
            teacher, student, torch.optim.SGD(student.parameters(), lr=0.1), DataLoader(data, 2)
        )
        for x, _ in loader:
            with accelerator.accumulate(teacher, student):
                with torch.no_grad():
                    wanted = teacher(x)
                accelerator.backward(mse_loss(student(x), wanted))
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(before, weights(teacher))
        return weights(accelerator.unwrap_model(student))

    taught = TensorDataset(data.tensors[0], net(5)(data.tensors[0]).detach())
    expected = plain(taught, batch=2 * ranks, window=2)
    assert all(close(ours, expected) for ours in run_threads(ranks, work))


def test_two_accelerators_that_take_turns_train_as_each_would_alone():
    data = samples(12)
    alone = [train(Accelerator(gradient_accumulation_steps=n), data, batch=2) for n in (2, 3)]
    runs = []
    for window in (2, 3):
        accelerator = Accelerator(gradient_accumulation_steps=window)
        model = net()
        parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 2)
        runs.append((accelerator, accelerator.prepare(*parts)))
    iterators = [iter(loader) for _, (_, _, loader) in runs]
    for _ in range(6):
        for (accelerator, (model, optimizer, _)), batches in zip(runs, iterators, strict=True):
            x, y = next(batches)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert [torch.equal(weights(model), w) for (_, (model, _, _)), w in zip(runs, alone, strict=True)] == [
        True,
        True,
    ]


def test_several_runs_in_one_process_are_each_like_the_first():
    data = samples(10)

    def run(**options):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(gradient_accumulation_steps=2, **options)
        made = train(accelerator, data, batch=2, stop=lambda epoch, index: index == 2)
        accelerator.end_training()
        return made

    first = run()
    run(mixed_precision="bf16")
    assert torch.equal(run(), first)


@pytest.mark.parametrize(("window", "exchanges"), [(1, 6), (3, 2), (4, 2)])
def test_ranks_speak_only_at_the_end_of_a_window(window, exchanges):
    data = samples(2 * 6 * 2)

    def work():
        calls = Counter()
        accelerator = Accelerator(gradient_accumulation_steps=window)
        model, optimizer, loader = (
            accelerator.prepare(model := net()),
            accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)),
            accelerator.prepare(DataLoader(data, 2)),
        )
        comm = current_world().comm
        original = comm.all_reduce
        comm.all_reduce = lambda tensor, op="sum": (
            calls.update([tensor.is_floating_point()]),
            original(tensor, op),
        )[1]
        try:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            del comm.all_reduce
        return calls[True]

    assert run_threads(2, work) == [exchanges] * 2
