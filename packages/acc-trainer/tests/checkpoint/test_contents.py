"""Objects of a checkpoint are found by name, or by their place with a check."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from acc_trainer import Accelerator
from acc_trainer.checkpoint import CheckpointError
from acc_trainer.checkpoint.contents import check_same_objects, collect


class Value:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def filled(value, size=3):
    model = torch.nn.Linear(size, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def of(accelerator):
    return [int(model.weight[0, 0]) for model in accelerator._models]


def test_named_models_and_optimizers_find_their_own_in_any_order(tmp_path):
    accelerator = Accelerator()
    generator, judge = accelerator.prepare(filled(1), filled(2))
    slow = torch.optim.SGD(generator.parameters(), lr=0.25)
    fast = torch.optim.SGD(judge.parameters(), lr=0.5)
    slow, fast = accelerator.prepare(slow, fast)
    falls = accelerator.prepare(torch.optim.lr_scheduler.StepLR(slow, 3))
    rises = accelerator.prepare(torch.optim.lr_scheduler.StepLR(fast, 5))
    accelerator.name_for_checkpoints(
        generator=generator, judge=judge, slow=slow, fast=fast, falls=falls, rises=rises
    )
    accelerator.register_for_checkpointing(ema=Value(3), best=Value(4))
    accelerator.save_state(str(tmp_path / "c"))

    again = Accelerator()
    ema, best = Value(), Value()
    judge, generator = again.prepare(filled(0), filled(0))
    fast = torch.optim.SGD(judge.parameters(), lr=1.0)
    slow = torch.optim.SGD(generator.parameters(), lr=1.0)
    fast, slow = again.prepare(fast, slow)
    rises = again.prepare(torch.optim.lr_scheduler.StepLR(fast, 1))
    falls = again.prepare(torch.optim.lr_scheduler.StepLR(slow, 1))
    again.register_for_checkpointing(best=best)
    again.register_for_checkpointing(ema=ema)
    again.name_for_checkpoints(
        generator=generator, judge=judge, slow=slow, fast=fast, falls=falls, rises=rises
    )
    again.load_state(str(tmp_path / "c"))
    assert of(again) == [2, 1]
    assert [one.param_groups[0]["lr"] for one in (fast, slow)] == [0.5, 0.25]
    assert [one.step_size for one in (rises, falls)] == [5, 3]
    assert (ema.value, best.value) == (3, 4)
    again.save_state(str(tmp_path / "d"))  # its files are called by its own order
    accelerator.load_state(str(tmp_path / "d"))
    assert of(accelerator) == [1, 2]


def test_weights_of_one_class_in_another_order_are_refused_by_their_shapes(tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(filled(1, 3), filled(2, 4))
    accelerator.save_state(str(tmp_path / "c"))
    again = Accelerator()
    again.prepare(filled(0, 4), filled(0, 3))
    with pytest.raises(
        CheckpointError, match=r"in the same order: it holds \[.*Linear \(shapes .*this run has"
    ):
        again.load_state(str(tmp_path / "c"))
    assert of(again) == [0, 0]


def test_optimizers_of_one_class_in_another_order_are_refused_by_what_they_train(tmp_path):
    def build(sizes):
        accelerator = Accelerator()
        models = accelerator.prepare(filled(1, 3), filled(2, 4))
        accelerator.prepare(*(torch.optim.SGD(models[at].parameters(), lr=0.1) for at in sizes))
        return accelerator

    build((0, 1)).save_state(str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="the optimizers of this run are not those of the checkpoint"):
        build((1, 0)).load_state(str(tmp_path / "c"))


def test_a_name_that_the_checkpoint_does_not_know_is_an_error_that_lists_both(tmp_path):
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(ema=Value(3))
    accelerator.save_state(str(tmp_path / "c"))
    again = Accelerator()
    again.register_for_checkpointing(mean=Value())
    with pytest.raises(
        CheckpointError, match=r"knows no 'mean': it holds \['ema=.*Value'\], this run has \['mean="
    ):
        again.load_state(str(tmp_path / "c"))


def test_what_was_saved_without_names_is_found_by_its_place(tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(filled(1), filled(2))
    accelerator.save_state(str(tmp_path / "c"))
    again = Accelerator()
    first, second = again.prepare(filled(0), filled(0))
    again.name_for_checkpoints(generator=first, judge=second)
    again.load_state(str(tmp_path / "c"))
    assert of(again) == [1, 2]


def test_names_are_for_what_is_in_checkpoints_and_one_object_each():
    accelerator = Accelerator()
    raw = filled(1)
    with pytest.raises(ValueError, match=r"generator=Linear is not in this run's checkpoints: prepare\(\)"):
        accelerator.name_for_checkpoints(generator=raw)
    accelerator.prepare(raw, second := filled(2))
    accelerator.name_for_checkpoints(generator=raw)
    with pytest.raises(ValueError, match="another object is called 'generator'"):
        accelerator.name_for_checkpoints(generator=second)
    accelerator.name_for_checkpoints(judge=raw)  # another name for it
    accelerator.name_for_checkpoints(generator=second)
    with pytest.raises(ValueError, match="state_dict"):
        accelerator.register_for_checkpointing(ema=3)


def test_objects_without_weak_references_can_have_names(tmp_path):
    class Slotted:
        __slots__ = ("value",)

        def __init__(self, value):
            self.value = value

        state_dict, load_state_dict = Value.state_dict, Value.load_state_dict

    accelerator = Accelerator()
    accelerator.register_for_checkpointing(one=Slotted(5))
    accelerator.save_state(str(tmp_path / "c"))
    accelerator._custom_objects[0].value = 6
    accelerator.load_state(str(tmp_path / "c"))
    assert accelerator._custom_objects[0].value == 5


def test_a_hook_that_takes_a_model_leaves_the_others_to_be_counted_anew(tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(filled(1), filled(2))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    accelerator.save_state(str(tmp_path / "c"))
    again = Accelerator()
    again.prepare(filled(8), filled(9))
    again.register_load_state_pre_hook(lambda models, folder: models.pop(0))
    again.load_state(str(tmp_path / "c"))
    assert of(again) == [8, 2]


def one_run(optimizer=torch.optim.AdamW, schedule=torch.optim.lr_scheduler.StepLR, custom=Value, **options):
    accelerator = Accelerator()
    model = filled(1)
    optimizer = optimizer(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, schedule(optimizer, 3))
    accelerator.register_for_checkpointing(custom(**options))
    return accelerator


class Other(Value):
    pass


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"optimizer": torch.optim.SGD}, r"optimizers .* state of a AdamW where this run has a SGD"),
        (
            {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
            "schedulers .* StepLR .* CosineAnnealingLR",
        ),
        ({"custom": Other}, "custom .* Value .* Other"),
    ],
)
def test_another_class_in_a_place_is_an_error_that_lists_both_and_changes_nothing(tmp_path, other, named):
    one_run(value=1).save_state(tmp_path / "c")
    run = one_run(**other)
    with torch.no_grad():
        run._models[0].weight.fill_(5)
    with pytest.raises(CheckpointError, match=f"(?s){named}.*name_for_checkpoints.*by hand"):
        run.load_state(tmp_path / "c")
    assert (of(run), run._custom_objects[0].value) == ([5], 0)
    assert run._optimizers[0].param_groups[0]["lr"] == 0.1


def test_a_class_that_was_moved_is_the_same_class(tmp_path):
    one_run(value=1).save_state(tmp_path / "c")
    moved = type("Value", (Value,), {"__module__": "elsewhere", "__qualname__": "make.<locals>.Value"})
    run = one_run(custom=moved)
    run.load_state(tmp_path / "c")
    assert run._custom_objects[0].value == 1


def test_what_has_a_name_takes_the_state_of_that_name_whatever_its_class(tmp_path):
    saved, again = Accelerator(), Accelerator()
    saved.register_for_checkpointing(best=Value(4))
    saved.save_state(tmp_path / "c")
    again.register_for_checkpointing(best=Other())
    again.load_state(tmp_path / "c")
    assert again._custom_objects[0].value == 4


def test_a_registered_model_is_the_same_compiled_or_not(tmp_path):
    saved, again = Accelerator(), Accelerator()
    saved.register_for_checkpointing(filled(2))
    saved.save_state(tmp_path / "c")
    compiled = torch.compile(filled(0), backend="eager")
    compiled.load_state_dict = compiled._orig_mod.load_state_dict
    again.register_for_checkpointing(compiled)
    again.load_state(tmp_path / "c")
    assert int(compiled.weight[0, 0]) == 2


def test_schedules_of_one_class_that_change_optimizers_are_an_error(tmp_path):
    def run(order):
        accelerator = Accelerator()
        models = filled(1), filled(2, size=4)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        schedules = [
            torch.optim.lr_scheduler.StepLR(one, size) for one, size in zip(optimizers, (1, 9), strict=True)
        ]
        accelerator.prepare(*models, *optimizers, *schedules[::order])
        return accelerator

    run(1).save_state(tmp_path / "c")
    run(1).load_state(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"(?s)schedulers .* in the same order.*of optimizer\).*of optimizer_1\)"
    ):
        run(-1).load_state(tmp_path / "c")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def loaders(*data, batch=2):
    accelerator = Accelerator()
    accelerator.prepare(*(DataLoader(one, batch) for one in data))
    return accelerator


def test_loaders_in_another_order_are_an_error_and_another_batch_size_is_none(tmp_path):
    few, many, others = TensorDataset(torch.arange(10)), TensorDataset(torch.arange(40)), list(range(7))
    loaders(few, many).save_state(tmp_path / "c")
    loaders(few, many, batch=4).load_state(tmp_path / "c")
    loaders(few, TensorDataset(torch.arange(50)), batch=4).load_state(tmp_path / "c")  # it has grown
    for order in ((many, few), (many, others)):
        with pytest.raises(CheckpointError, match=r"(?s)loaders .* in the same order.*10 of TensorDataset"):
            loaders(*order).load_state(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"loaders .* where one has a stream.*a stream of Stream"):
        loaders(few, Stream()).load_state(tmp_path / "c")


@pytest.mark.parametrize("closed", ["saved", "loaded"])
def test_data_whose_length_cannot_be_asked_any_more_is_saved_and_loaded(tmp_path, closed):
    class Table(list):
        closed = False

        def __len__(self):
            if self.closed:
                raise ValueError("I/O operation on closed file")
            return super().__len__()

    tables = {"saved": Table(range(8)), "loaded": Table(range(8))}
    runs = {when: loaders(table) for when, table in tables.items()}
    tables[closed].closed = True
    runs["saved"].save_state(tmp_path / "c")
    runs["loaded"].load_state(tmp_path / "c")
    (saved,) = collect(runs["saved"]).described()["loaders"]
    assert ("samples" in saved) == (closed == "loaded")


def test_a_manifest_that_says_less_is_compared_in_what_it_says(tmp_path):
    accelerator = loaders(TensorDataset(torch.arange(10)), Stream())
    described = collect(accelerator).described()["loaders"]
    old = [{key: one[key] for key in ("name", "class")} for one in described]
    check_same_objects(collect(accelerator), {"loaders": old}, tmp_path)
