"""prepare: one wrapper for one object, bound to the Accelerator that prepared it last."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_plugins.pipeline.piped import Piped, mark_piped
from acc_trainer import AcceleratedOptimizer, AcceleratedScheduler, Accelerator


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def objects(**options):
    accelerator = Accelerator(**options)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return accelerator, (model, optimizer, scheduler, DataLoader(range(4), 2))


def shelves(accelerator):
    return [
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
    ]


def test_what_was_prepared_before_freeing_is_prepared_again_as_it_is():
    accelerator, given = objects()
    made = accelerator.prepare(*given)
    accelerator.free_memory()
    assert accelerator.prepare(*made) == made
    assert shelves(accelerator) == [[one] for one in made]
    assert list(accelerator.grad_sync.optimizers) == [made[1]]


def test_what_another_accelerator_prepared_follows_the_one_it_is_given_to():
    first, given = objects(gradient_accumulation_steps=3)
    second = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    made = second.prepare(*first.prepare(*given))
    model, optimizer, scheduler, loader = made
    assert shelves(second) == [[one] for one in made]
    assert not first.grad_sync.optimizers
    assert optimizer.grad_sync is loader.grad_sync is second.grad_sync
    assert not scheduler.step_with_optimizer
    moved = []
    for _ in range(4):
        before = model[0].weight.detach().clone()
        with second.accumulate(model):
            second.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(before, model[0].weight))
    assert moved == [False, False, False, True]
    assert first.prepare(*made) == made
    assert optimizer.grad_sync is loader.grad_sync is first.grad_sync


def test_one_object_has_one_wrapper_however_often_it_is_prepared():
    accelerator, given = objects()
    made = accelerator.prepare(*given)
    assert accelerator.prepare(*given) == made
    assert accelerator.prepare(*given, *made) == made + made
    assert shelves(accelerator) == [[one] for one in made]
    again = objects()[1]
    assert len(set(map(id, accelerator.prepare(*again, *again)))) == 4
    assert [len(shelf) for shelf in shelves(accelerator)] == [2, 2, 2, 2]


def test_a_loader_prepared_with_other_options_is_another_loader():
    accelerator = Accelerator()
    loader = DataLoader(range(4))
    made = accelerator.prepare(loader)
    rest = accelerator.skip_first_batches(made, 1)
    assert accelerator.prepare_data_loader(loader, device_placement=False) is not made
    accelerator.even_batches = False
    assert accelerator.prepare(loader) is not made
    accelerator.free_memory()
    accelerator.prepare(rest)
    assert len(list(accelerator.prepare(loader))) == 4


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        ([1, torch.nn.Linear(1, 1)], "list holds a model"),
        ({"m": torch.nn.Linear(1, 1)}, "dict holds a model"),
        ((DataLoader(range(2)),), "tuple holds a dataloader"),
    ],
)
def test_things_in_a_container_come_back_unprepared_with_a_warning(held, kind, caplog):
    accelerator = Accelerator()
    assert accelerator.prepare(held) is held
    assert f"{kind}, which is not prepared" in caplog.text
    assert shelves(accelerator) == [[], [], [], []]
    caplog.clear()
    accelerator.prepare([1, 2], {"lr": 0.1}, "text")
    assert not caplog.records


class _Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def test_a_raw_stream_that_leaves_out_batches_is_prepared_too():
    def rank():
        accelerator = Accelerator()
        skipping = accelerator.skip_first_batches(DataLoader(_Numbers(), 2), 2)
        made = accelerator.prepare(skipping)
        assert made is not skipping
        assert accelerator.prepare(skipping) is made
        return [batch.tolist() for batch in made]

    assert run_threads(2, rank) == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def test_freeing_memory_closes_the_strategy(monkeypatch):
    accelerator = Accelerator()
    closed = []
    monkeypatch.setattr(accelerator.strategy, "close", lambda: closed.append("closed"))
    accelerator.free_memory()
    assert closed == ["closed"]


def test_a_loader_may_be_iterated_inside_itself():
    accelerator = Accelerator()
    one, two = accelerator.prepare(*[DataLoader(range(3))] * 2)
    assert one is two
    assert [(int(a), [int(b) for b in two]) for a in one] == [(a, [0, 1, 2]) for a in range(3)]


def test_wrappers_made_by_hand_are_taken_in_with_what_they_were_told():
    accelerator, (_model, optimizer, scheduler, _loader) = objects()
    by_hand = AcceleratedOptimizer(optimizer)
    schedule = AcceleratedScheduler(scheduler, by_hand, step_with_optimizer=False)
    assert accelerator.prepare(by_hand, schedule) == (by_hand, schedule)
    assert (accelerator._optimizers, accelerator._schedulers) == ([by_hand], [schedule])
    assert not schedule.step_with_optimizer
    scaled = AcceleratedOptimizer(objects()[1][1], scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"Adam was wrapped with a gradient scaler.*mixed_precision='no'"):
        accelerator.prepare(scaled)
    assert accelerator._optimizers == [by_hand]


def test_a_compiled_model_is_not_compiled_twice():
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(net())
    accelerator.free_memory()
    assert accelerator.prepare(model) is model


def test_a_reprepared_run_is_saved_whole(tmp_path):
    accelerator, given = objects()
    made = accelerator.prepare(*given)
    accelerator.free_memory()
    accelerator.prepare(*made)
    accelerator.save_state(str(tmp_path / "checkpoint"))
    names = {file.name for file in (tmp_path / "checkpoint").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= names


def test_a_model_prepared_for_evaluation_can_be_prepared_for_training_after_all():
    def rank():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False)
        evaluated = accelerator.prepare_model(model, evaluation_mode=True)
        assert accelerator.prepare_model(model, evaluation_mode=True) is evaluated
        trained = accelerator.prepare(model)
        assert accelerator._models == [trained]
        accelerator.backward(trained(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
        return [p.grad.item() for p in model.parameters()]

    assert run_threads(2, rank) == [[1.5], [1.5]]


def test_what_belongs_to_a_pipeline_is_refused_since_a_checkpoint_would_hold_one_part_of_it():
    class Pipe(Piped):
        """As far as prepare looks at one."""

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AcceleratedOptimizer(optimizer)
    accelerator = Accelerator()
    mark_piped(list(model[2].parameters()))  # one rank's stage
    for thing, said in (
        (Pipe(), "cannot take a Pipe"),
        (model, "the Sequential of a pipeline's weights"),
        (optimizer, "the SGD of a pipeline's weights"),
        (wrapped, "the AcceleratedOptimizer of a pipeline's weights"),
    ):
        with pytest.raises(
            TypeError, match=rf"{said}.*register_for_checkpointing\(pipe.with_optimizer\(optimizer\)\)"
        ):
            accelerator.prepare(thing)
    assert shelves(accelerator) == [[], [], [], []]
    other = net()  # weights that are equal are still others
    other.load_state_dict(model.state_dict())
    accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
