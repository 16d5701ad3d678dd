"""How a run ends: objects are freed, trackers and groups are closed, and the next run in the same interpreter starts fresh."""

from __future__ import annotations

import gc
import multiprocessing as mp
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.memory import find_executable_batch_size
from acc_ops.testing import run_threads
from acc_plugins import DataLoaderConfiguration
from acc_trainer import state
from acc_trainer.accelerator import Accelerator
from acc_trainer.state import AcceleratorState, PartialState, is_initialized
from acc_trainer.tracking.tracker import GeneralTracker


@pytest.fixture
def no_collector():
    """What dies without the garbage collector dies at once; but torch's first step of a process keeps its frames in cycles."""
    some_steps(Accelerator())
    AcceleratorState._reset_state(True)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def some_steps(accelerator):
    """Train a little; weak references to all that took part, and the prepared objects."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), 4, shuffle=True)
    raw = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "data": loader.dataset,
    }
    raw["weight"] = model[0].weight
    made = accelerator.prepare(model, optimizer, scheduler, loader)
    prepared = dict(
        zip(
            ("prepared model", "prepared optimizer", "prepared scheduler", "prepared loader"),
            made,
            strict=True,
        )
    )
    watched = {name: weakref.ref(thing) for name, thing in {**raw, **prepared}.items()}
    model, optimizer, scheduler, loader = made
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(x)
    return watched, made


def alive(watched):
    return [name for name, reference in watched.items() if reference() is not None]


@pytest.mark.parametrize("free", ["free_memory", "clear"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_freed_objects_are_gone_at_once(free, precision, dispatch, no_collector, monkeypatch):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=2, dataloader_config=config
    )
    watched, made = some_steps(accelerator)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # nothing in it may be needed
    model, optimizer, scheduler, loader = getattr(accelerator, free)(*made)
    del made
    assert (model, optimizer, scheduler, loader) == (None,) * 4
    assert alive(watched) == []
    assert accelerator.step == 0


@pytest.mark.parametrize("how", ["break", "an exception", "an open window", "a skip"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_was_left_early_holds_nothing(how, workers, no_collector):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    data = TensorDataset(torch.randn(32, 4))
    loader = DataLoader(data, 4, num_workers=workers, persistent_workers=workers > 0)
    model = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    watched = {"data": weakref.ref(data), "loader": weakref.ref(loader), "weight": weakref.ref(model.weight)}
    try:
        for step, (x,) in enumerate(loader if how != "a skip" else accelerator.skip_first_batches(loader, 3)):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                if step == 1 and how == "an exception":
                    raise KeyError(how)
                optimizer.zero_grad()
            if step == (3 if how == "break" else 2):
                break
    except KeyError:
        pass
    workers_of = mp.active_children()
    if (
        how == "a skip"
    ):  # that loader went with its loop; torch waits 5 s for its workers to end, which a busy machine may need
        for worker in workers_of:
            worker.join(timeout=30)
            assert not worker.is_alive()
    else:
        assert len(workers_of) == workers
    data = loader = model = optimizer = x = None
    accelerator.free_memory()
    assert alive(watched) == []
    for worker in workers_of:  # told to end when their loader went
        worker.join(timeout=30)
        assert not worker.is_alive()


def test_freed_objects_are_gone_where_ranks_are_threads(no_collector):
    def run():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        watched, made = some_steps(accelerator)
        made = accelerator.free_memory(*made)
        return alive(watched)

    assert run_threads(2, run) == [[], []]


def test_an_accelerator_and_its_strategy_are_gone_with_their_last_name(no_collector):
    accelerator = Accelerator()
    watched = {"strategy": weakref.ref(accelerator.strategy), "accelerator": weakref.ref(accelerator)}
    some_steps(accelerator)
    accelerator.free_memory()
    accelerator.end_training()
    del accelerator
    assert alive(watched) == []


def test_after_free_memory_the_same_accelerator_prepares_anew():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    for _ in range(3):
        watched, made = some_steps(accelerator)
        assert len(accelerator._models) == len(accelerator._optimizers) == 1
        made = accelerator.free_memory(*made)
        assert alive(watched) == []


def test_a_batch_size_that_fits_is_found_and_each_attempt_starts_with_nothing(no_collector):
    accelerator = Accelerator()
    attempts = []
    watched = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size):
        accelerator.free_memory()
        attempts.append((batch_size, [alive(one) for one in watched if alive(one)], len(accelerator._models)))
        one, made = some_steps(accelerator)
        watched.append(one)
        if batch_size > 15:
            raise torch.OutOfMemoryError("no room")
        return accelerator.unwrap_model(made[0])

    assert isinstance(train(), nn.Module)
    assert attempts == [(20, [], 0), (18, [], 0), (16, [], 0), (14, [], 0)]


class Recorded(GeneralTracker):
    name = "recorded"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.events = []

    @property
    def tracker(self):
        return self.events

    def store_init_configuration(self, values):
        self.events.append("config")

    def log(self, values, step=None, **kwargs):
        self.events.append("log")

    def finish(self):
        self.events.append("finish")


def test_the_end_finishes_the_trackers_once_and_may_be_said_twice():
    tracker = Recorded()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.events.count("finish") == 1


class FailsToFinish(Recorded):
    name = "fails"

    def finish(self):
        raise OSError("disk full")


def test_a_tracker_that_cannot_finish_keeps_no_run_from_ending():
    ended = Recorded()
    accelerator = Accelerator(log_with=[FailsToFinish(), ended])
    accelerator.init_trackers("run")
    try:
        accelerator.end_training()
    except OSError:
        pytest.fail("a tracker that fails does not end the training")
    assert ended.events.count("finish") == 1
    assert not is_initialized()


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_in_a_row_start_fresh_with_another_precision_too(ranks):
    def runs():
        said = []
        for precision in ("no", "bf16", "no", "bf16"):
            accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=3)
            model = accelerator.prepare(nn.Linear(2, 2))
            with accelerator.autocast():
                lower = torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype
            said.append((accelerator.mixed_precision, accelerator.step, len(accelerator._models), str(lower)))
            accelerator.backward(model(torch.ones(1, 2)).sum())
            accelerator.end_training()
        return said

    plain, low = ("no", 0, 1, "torch.float32"), ("bf16", 0, 1, "torch.bfloat16")
    assert run_threads(ranks, runs) == [[plain, low, plain, low]] * ranks


def test_a_run_that_is_over_shows_what_it_was_and_leaves_the_next_alone():
    first, beside = Accelerator(), Accelerator()
    first.end_training()
    assert not is_initialized()
    assert (beside.mixed_precision, beside.device.type, PartialState().num_processes) == ("no", "cpu", 1)
    second = Accelerator(mixed_precision="bf16")
    assert (first.state.mixed_precision, second.state.mixed_precision) == ("no", "bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    first.end_training()  # said again, when a newer run is on
    assert is_initialized()
    with pytest.raises(ValueError, match="mixed_precision is 'bf16' already"):
        Accelerator(mixed_precision="no")


@pytest.mark.parametrize("over", [False, True])
def test_the_end_leaves_the_process_group_once(over, monkeypatch):
    accelerator = Accelerator()
    if over:
        accelerator.end_training()
    left = []
    monkeypatch.setattr(state, "leave_world", lambda: left.append(True))
    accelerator.end_training()
    assert left == ([] if over else [True])


def test_a_reset_by_hand_starts_fresh_as_well():
    Accelerator(mixed_precision="bf16")
    AcceleratorState._reset_state()
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
