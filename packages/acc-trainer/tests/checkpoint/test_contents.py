"""Objects of a checkpoint are found by name, or by their place with a check."""

from __future__ import annotations

import pytest
import torch

from acc_trainer import Accelerator
from acc_trainer.checkpoint import CheckpointError


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
