"""AcceleratedScheduler: one move for each real update."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

from acc_ops.testing import run_threads
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_trainer import Accelerator
from acc_trainer.scheduler import AcceleratedScheduler


def run(make, *, steps, accumulate=1, **options):
    """The learning rate after every call of `scheduler.step()`."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model,
        optimizer,
        make(optimizer),
        DataLoader(torch.ones(steps * accelerator.num_processes, 1), batch_size=1),
    )
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(round(optimizer.param_groups[0]["lr"], 9))
    return rates


def plain(make, steps):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(round(optimizer.param_groups[0]["lr"], 9))
    return rates


SCHEDULES = [
    lambda o: LambdaLR(o, lambda step: 0.9**step),
    lambda o: CosineAnnealingLR(o, 10),
    lambda o: OneCycleLR(o, max_lr=1.0, total_steps=8),
    lambda o: ChainedScheduler([ConstantLR(o, 0.5, 2), LambdaLR(o, lambda step: 0.9**step)]),
    lambda o: SequentialLR(o, [ConstantLR(o, 0.1, 2), OneCycleLR(o, max_lr=1.0, total_steps=9)], [2]),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_on_one_process_the_rates_are_those_of_a_plain_loop(make):
    assert run(make, steps=6) == plain(make, 6)


@pytest.mark.parametrize("make", SCHEDULES)
def test_accumulation_moves_the_schedule_once_per_update(make):
    rates = run(make, steps=7, accumulate=2)
    assert rates[1::2] + rates[6:] == plain(make, 4)
    assert rates[2::2][:2] == rates[1::2][:2]


def test_a_step_counts_for_every_process_but_never_past_the_end():
    def work():
        return run(lambda o: LambdaLR(o, lambda step: step), steps=3), run(
            lambda o: OneCycleLR(o, max_lr=1.0, total_steps=5), steps=4
        )

    (counted, ended), _ = run_threads(2, work)
    assert counted == [2, 4, 6]
    assert ended[1] == plain(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=5), 4)[3]
    assert ended[2] == ended[3]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ChainedScheduler(
            [OneCycleLR(o, max_lr=1.0, total_steps=5), LambdaLR(o, lambda step: 0.9**step)]
        ),
        lambda o: SequentialLR(o, [ConstantLR(o, 0.1, 2), OneCycleLR(o, max_lr=1.0, total_steps=3)], [2]),
    ],
)
def test_a_schedule_inside_another_is_not_driven_past_its_end_either(make):
    rates, _ = run_threads(2, lambda: run(make, steps=6))
    assert rates[:2] == plain(make, 4)[1::2]  # two for each step
    assert rates[2:] == [plain(make, 5)[-1]] * 4


def test_after_a_short_schedule_the_next_of_a_sequence_goes_on():
    def make(o):
        return SequentialLR(o, [OneCycleLR(o, max_lr=1.0, total_steps=3), ConstantLR(o, 0.5, 100)], [4])

    assert run(make, steps=8) == plain(make, 8)


def test_with_split_batches_a_step_counts_once():
    def work():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer, scheduler = accelerator.prepare(optimizer, LambdaLR(optimizer, lambda step: step))
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert run_threads(2, work) == [1, 1]


def test_a_plateau_counts_once_per_call_on_any_number_of_processes():
    def work():
        accelerator = Accelerator()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer, scheduler = accelerator.prepare(
            optimizer, ReduceLROnPlateau(optimizer, factor=0.1, patience=3)
        )
        rates = []
        for _ in range(5):
            scheduler.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run_threads(2, work) == [[1.0] * 4 + [0.1]] * 2


def test_a_skipped_step_does_not_move_the_schedule():
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, LambdaLR(optimizer, lambda step: step + 1)
    )
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def fp16_run(make):
    """An fp16 run with a switch for overflow, whose schedule is `make(optimizer)`."""
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, make(optimizer), DataLoader(torch.ones(6, 1))
    )

    def epoch(overflows=(), stop=None):
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum() * (float("inf") if index in overflows else 1e-3))
                optimizer.step()
                optimizer.zero_grad()
            if index == stop:
                break

    return epoch, optimizer, scheduler


def test_a_schedule_stepped_once_an_epoch_moves_although_the_last_update_was_skipped():
    epoch, optimizer, scheduler = fp16_run(lambda o: StepLR(o, 1, gamma=0.5))
    epoch(overflows=[5])
    assert optimizer.step_was_skipped
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    scheduler.step()  # nothing was updated since
    assert scheduler.get_last_lr() == [0.5]
    epoch(stop=2)  # left inside a window
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]
    epoch(overflows=[0, 2, 4])
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_a_plateau_hears_every_epochs_figure():
    epoch, optimizer, scheduler = fp16_run(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    rates = []
    for _ in range(4):
        epoch(overflows=[5])
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5]


def test_with_two_optimizers_both_must_have_moved():
    accelerator = Accelerator()
    one, two = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    one, two = accelerator.prepare(one, two)
    scheduler = AcceleratedScheduler(LambdaLR(one, lambda step: step), [one, two])
    for optimizer in (one, two):
        optimizer.step()
    two._skipped = True  # as after an overflow
    two._updates = 0
    scheduler.step()
    assert scheduler.get_last_lr() == [0]
    two.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1]


def test_not_tied_to_the_optimizer_it_always_moves():
    accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, LambdaLR(optimizer, lambda step: step))
    with accelerator.accumulate():
        scheduler.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [2]


def test_a_scheduler_of_the_users_own_is_one_too():
    class Halving:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            for group in self.optimizer.param_groups:
                group["lr"] /= 2
            return "halved"

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, Halving(optimizer))
    assert isinstance(scheduler, AcceleratedScheduler)
    with accelerator.accumulate():
        assert scheduler.step() is None
    with accelerator.accumulate():
        optimizer.step()
        assert scheduler.step() == "halved"
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_each_scheduler_follows_its_own_optimizer():
    accelerator = Accelerator()
    one, two = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    scheduler, one, two = accelerator.prepare(LambdaLR(two, lambda step: step), one, two)
    assert scheduler.optimizers == [two]
    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert accelerator.prepare_scheduler(LambdaLR(elsewhere, lambda step: step)).optimizers == [one, two]


@pytest.mark.parametrize("first", ["scheduler", "optimizer"])
def test_a_skipped_step_holds_the_schedule_in_whichever_order_they_were_prepared(first):
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    if first == "scheduler":
        scheduler = accelerator.prepare(scheduler)
    model, optimizer = accelerator.prepare(model, optimizer)
    if first == "optimizer":
        scheduler = accelerator.prepare(scheduler)
    rates = []
    for factor in (float("inf"), 0.0):
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5]


def test_a_schedule_follows_an_optimizer_that_is_prepared_later():
    accelerator = Accelerator()
    other, own = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    schedule = AcceleratedScheduler(LambdaLR(own, lambda step: step), [], step_with_optimizer=False)
    accelerator.prepare(schedule, other)
    own = accelerator.prepare(own)
    assert schedule.optimizers == [own]
    assert not schedule.step_with_optimizer  # as it was told


def test_the_rest_is_the_schedulers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = AcceleratedScheduler(CosineAnnealingLR(optimizer, 10), [])
    scheduler.step()
    assert scheduler.T_max == 10
    assert scheduler.last_epoch == 1
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert scheduler.last_epoch == 1
    assert len(scheduler.get_lr()) == 1
    assert copy.deepcopy(scheduler).T_max == 10
    with pytest.raises(AttributeError):
        scheduler.nothing_of_this_name
