"""The step timer: every moment has one phase, and nothing is left behind."""

from __future__ import annotations

import itertools
import threading
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, timing
from acc_trainer.timing import PHASES, StepTimer
from acc_trainer.timing_picture import draw


@pytest.fixture
def ticks(monkeypatch):
    """A clock that goes on by one second a look, so that seconds count the marks."""
    count = itertools.count()
    clock = timing._Clock("ticks", lambda: next(count), lambda _: True, lambda begin, end: end - begin)
    monkeypatch.setattr(timing, "_clock_of", lambda _: clock)


def prepared(accelerator, batches=4):
    model = nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.randn(2 * batches * accelerator.num_processes, 3)), batch_size=2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def train(accelerator, model, optimizer, data):
    for (x,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def test_every_step_has_its_phases_and_they_fill_it(ticks):
    accelerator = Accelerator()
    parts = prepared(accelerator)
    with accelerator.time_steps() as timer:
        train(accelerator, *parts)
    assert timer.steps == 4
    # between two marks is one tick; what the script does itself lies between the phases
    expected = {"data": 1, "forward": 1, "backward": 1, "sync": 0, "step": 1, "other": 4}
    assert {phase: timer.seconds(phase) for phase in PHASES} == {
        phase: [ticks] * 4 for phase, ticks in expected.items()
    }
    assert timer.means() == expected


def test_clipping_and_unscaling_count_as_the_step(ticks):
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer, _ = prepared(accelerator)
    with accelerator.time_steps() as timer:
        accelerator.backward(model(torch.ones(2, 3)).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    # without a prepared loader each call that counts as the step ends one
    assert sum(timer.seconds("step")) == 3 + 2 * (accelerator.scaler is not None)


def test_without_a_prepared_loader_a_step_ends_with_the_optimizer(ticks):
    accelerator = Accelerator()
    model, optimizer, _ = prepared(accelerator)
    with accelerator.time_steps() as timer:
        for _ in range(3):
            accelerator.backward(model(torch.ones(2, 3)).mean())
            optimizer.step()
    assert timer.steps == 3
    assert timer.seconds("data") == [0, 0, 0]


def test_micro_batches_that_only_accumulate_take_no_step(ticks):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    parts = prepared(accelerator)
    with accelerator.time_steps() as timer:
        train(accelerator, *parts)
    assert timer.seconds("step") == [0, 1, 0, 1]


def test_ranks_that_wait_for_gradients_have_a_sync_phase(ticks):
    def work():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        parts = prepared(accelerator)
        with accelerator.time_steps() as timer:
            train(accelerator, *parts)
        return (
            timer.steps,
            [one > 0 for one in timer.seconds("sync")],
            [one > 0 for one in timer.seconds("backward")],
        )

    assert run_threads(2, work) == [(4, [True] * 4, [True] * 4)] * 2


def test_waiting_for_another_rank_is_sync():
    waits = threading.Event()

    def work():
        accelerator = Accelerator()
        model, _, data = prepared(accelerator, batches=1)
        with accelerator.time_steps() as timer:
            turn_to = timer.turn_to
            timer.turn_to = lambda phase: (turn_to(phase), waits.set())
            for (x,) in data:
                loss = model(x).square().mean()
                if accelerator.process_index == 1:  # it begins only when rank 0 is in its phase `sync`
                    assert waits.wait(60)
                accelerator.backward(loss)
        return [timer.seconds("sync")[0] > 0, timer.seconds("backward")[0] > 0]

    assert run_threads(2, work) == [[True, True]] * 2


def test_the_results_are_those_without_a_timer():
    def weights(timed):
        torch.manual_seed(0)
        accelerator = Accelerator()
        model, optimizer, data = prepared(accelerator)
        if timed:
            with accelerator.time_steps():
                train(accelerator, model, optimizer, data)
        else:
            train(accelerator, model, optimizer, data)
        return model.state_dict()

    plain, timed = weights(False), weights(True)
    assert all(torch.equal(plain[name], timed[name]) for name in plain)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind_also_after_an_exception(fails):
    accelerator = Accelerator()
    model, optimizer, data = prepared(accelerator)
    strategy, step = accelerator.strategy, optimizer._strategy_step
    with pytest.raises(KeyError) if fails else pytest.raises(ZeroDivisionError), accelerator.time_steps():
        train(accelerator, model, optimizer, data)
        made = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        raise KeyError if fails else ZeroDivisionError
    assert accelerator.strategy is strategy
    assert accelerator.grad_sync.reading is None
    assert optimizer._strategy_step == step
    assert made._strategy_step == step
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_errors_inside_a_phase_close_it(ticks):
    accelerator = Accelerator()
    model, _, data = prepared(accelerator, batches=3)
    with accelerator.time_steps() as timer:
        for _ in data:
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 5))  # a wrong shape
            with pytest.raises(RuntimeError):
                accelerator.backward(torch.ones(()))  # nothing to differentiate
            with pytest.raises(TypeError):
                accelerator.backward(None)
    assert timer.seconds("forward") == [1, 1, 1]
    assert timer.seconds("backward") == [2, 2, 2]
    assert timer._phases == [timing._OTHER]


def test_a_data_set_that_raises_closes_the_phase(ticks):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            if number == 2:
                raise OSError("a broken file")
            return torch.zeros(3)

    accelerator = Accelerator()
    data = accelerator.prepare(DataLoader(Broken(), batch_size=1))
    with accelerator.time_steps() as timer:
        with pytest.raises(OSError, match="a broken file"):
            for _ in data:
                pass
        assert timer._phases == [timing._OTHER]
    assert timer.seconds("data") == [1, 1]


def test_a_compiled_model_is_timed_too(ticks):
    accelerator = Accelerator(dynamo_backend="eager")
    parts = prepared(accelerator)
    with accelerator.time_steps() as timer:
        train(accelerator, *parts)
    assert timer.seconds("forward") == [1] * 4


def test_a_loop_may_be_left_and_may_outlive_the_block(ticks):
    accelerator = Accelerator()
    _, _, data = prepared(accelerator)
    with accelerator.time_steps() as timer:
        for _ in data:
            break
        batches = iter(data)
        next(batches)
    assert timer.steps == 2
    assert len(list(batches)) == 3
    assert timer.steps == 2
    assert not accelerator.grad_sync.loaders


def test_a_timed_loop_that_is_left_closes_the_pass_beneath_it():
    def batches():
        try:
            yield from range(3)
        finally:
            ended.append(True)

    ended, timer, beneath = [], StepTimer(torch.device("cpu")), batches()
    timer.begin()
    reading = timer.reading(beneath)
    assert next(reading) == 0
    reading.close()
    assert ended == [True]


def test_one_block_at_a_time():
    accelerator = Accelerator()
    with (
        accelerator.time_steps(),
        pytest.raises(ValueError, match="running already"),
        accelerator.time_steps(),
    ):
        pass
    with accelerator.time_steps():
        pass


def test_steps_are_read_while_they_go_on(ticks):
    accelerator = Accelerator()
    _, _, data = prepared(accelerator)
    with accelerator.time_steps() as timer:
        assert timer.means() == dict.fromkeys(PHASES, 0.0)
        assert [timer.steps for _ in data] == [0, 1, 2, 3]


def test_the_table_names_every_phase_with_its_share(ticks):
    accelerator = Accelerator()
    parts = prepared(accelerator)
    with accelerator.time_steps() as timer:
        train(accelerator, *parts)
    title, head, *rows = timer.table().splitlines()
    assert title.startswith("4 steps of 8e+03 ms on average")
    assert head.split() == ["ms", "median", "95", "%", "share"]
    assert [row.split()[0] for row in rows] == list(PHASES)
    assert rows[-1].split() == ["other", "4000.000", "4000.000", "4000.000", "50.0%"]


def test_the_picture_is_saved_and_other_formats_are_refused(tmp_path):
    timer = StepTimer(torch.device("cpu"))
    path = timer.save(tmp_path / "new" / "steps.svg", title="a < b")
    assert "a &lt; b" in path.read_text()
    with pytest.raises(ValueError, match=r"ends in .svg, got 'steps.png'"):
        timer.save("steps.png")
    with pytest.raises(ValueError, match="no phase 'wait': choose from data, forward"):
        timer.seconds("wait")


@given(st.integers(min_value=0, max_value=1000), st.floats(min_value=0, max_value=10))
def test_the_picture_is_well_formed_and_stays_small_whatever_was_timed(count, seconds):
    figures = {phase: [seconds * (1 + number % 3) for number in range(count)] for phase in PHASES}
    picture = draw(figures, "title")
    shapes = list(ElementTree.fromstring(picture))
    assert len(shapes) <= 6 * 425 + 30
    assert all(float(shape.get("width", 0)) <= 960 for shape in shapes)
    assert picture == draw(figures, "title")


class Stamp:
    """An event of a device that has come as far as `reached`."""

    reached = 0
    made = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Stamp.made += 1
        self.number = Stamp.made

    def query(self):
        return self.number <= Stamp.reached

    def synchronize(self):
        Stamp.reached = max(Stamp.reached, self.number)

    def elapsed_time(self, other):
        return (other.number - self.number) * 1e3


def test_on_an_accelerator_steps_are_settled_when_the_device_has_reached_them(monkeypatch):
    monkeypatch.setattr(torch, "xyz", type("module", (), {"Event": Stamp}), raising=False)
    Stamp.made = Stamp.reached = 0
    timer = StepTimer(type("device", (), {"type": "xyz"})())
    assert timer.clock == "xyz events"
    timer.begin()
    for _ in timer.reading(iter(range(3))):
        pass
    assert len(timer._pending) == 3
    Stamp.reached = 4  # the first step ended with mark 4: begin, data, other, data
    timer._settle(wait=False)
    assert len(timer._pending) == 2
    timer.end()
    assert timer.seconds("data") == [1, 1, 1]
    assert timer.seconds("other") == [1, 1, 1]
