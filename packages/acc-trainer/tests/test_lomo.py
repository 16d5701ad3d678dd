"""LOMO optimizers, with a stand-in whose class bears the library's module name: it updates in `fused_backward`."""

from __future__ import annotations

import pytest
import torch

from acc_trainer import Accelerator
from acc_trainer.optimizer import AcceleratedOptimizer


class Lomo(torch.optim.Optimizer):
    """What lomo-optim's do: no `step`, the weights move in the backward pass."""

    __module__ = "lomo_optim.lomo"

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})

    def fused_backward(self, loss, lr):
        loss.backward()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= lr * p.grad
                p.grad = None


def parts(**options):
    accelerator = Accelerator(**options)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return accelerator, *accelerator.prepare(model, Lomo(model))


def test_backward_with_a_learning_rate_updates():
    accelerator, model, optimizer = parts(gradient_accumulation_steps=2)
    assert accelerator.has_lomo_optimizer
    accelerator.backward(model(torch.ones(1, 1)).sum(), learning_rate=0.5)
    assert model.weight.item() == 0.75  # half a loss, as for every other optimizer
    accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.5)
    assert model.weight.item() == 0.25
    assert optimizer.step() is None
    assert not optimizer.step_was_skipped


def test_one_built_by_hand_has_nothing_to_do_in_step_either():
    optimizer = AcceleratedOptimizer(Lomo(torch.nn.Linear(1, 1)))
    assert optimizer.step() is None
    assert not optimizer.step_was_skipped


def test_other_optimizers_train_beside_it():
    accelerator, model, _ = parts()
    other = torch.nn.Linear(1, 1)
    other, optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(other(torch.ones(1, 1)).sum())
    before = other.bias.item()
    optimizer.step()
    assert other.bias.item() == pytest.approx(before - 0.1)
    assert model.weight.item() == 1


def test_what_is_missing_is_said():
    accelerator, model, _ = parts()
    with pytest.raises(ValueError, match="pass learning_rate="):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), None)
    accelerator.free_memory()
    assert not accelerator.has_lomo_optimizer
    with pytest.raises(ValueError, match=r"Lomo, AdaLomo.*use backward\(loss\)"):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.1)
    with pytest.raises(TypeError, match="learning_rate"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), learning_rate=0.1)


def test_scaled_gradients_are_refused():
    accelerator, model, _ = parts(mixed_precision="fp16")
    with pytest.raises(ValueError, match="use 'bf16' or 'no'"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), learning_rate=0.1)
