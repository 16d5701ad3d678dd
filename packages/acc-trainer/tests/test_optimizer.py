"""AcceleratedOptimizer: steps at the end of a window, and says what happened."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from acc_plugins.options.kwargs import GradScalerKwargs
from acc_trainer import Accelerator
from acc_trainer.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step


def parts(**options):
    accelerator = Accelerator(**options)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


def test_it_stands_for_the_optimizer():
    _, _, optimizer = parts()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["momentum"] == 0.9
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2
    assert "SGD" in repr(optimizer)
    with pytest.raises(AttributeError):
        optimizer.nothing_of_this_name


def test_a_closure_trains_as_in_plain_torch_and_its_loss_comes_back():
    x, y = torch.randn(8, 2), torch.randn(8, 1)

    def run(prepare):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
        accelerator = Accelerator()
        if prepare:
            model, optimizer = accelerator.prepare(model, optimizer)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss) if prepare else loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, model.weight.tolist()

    assert run(True) == run(False)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True, "capturable": False, "differentiable": False}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ],
)
def test_flags_state_and_groups_are_the_optimizers_own(kind, flags):
    def run(prepare):
        torch.manual_seed(0)
        model, late = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        optimizer = kind([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1, **flags)
        accelerator = Accelerator()
        if prepare:
            model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.2})
                optimizer.param_groups[1]["lr"] = 0.3
            loss = late(model(torch.ones(3, 2))).square().mean()
            accelerator.backward(loss) if prepare else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, model

    (ours, model), (plain, twin) = run(True), run(False)
    assert torch.equal(model.weight, twin.weight)
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert {**ours.defaults} == plain.defaults
    assert all(ours.param_groups[0][name] == value for name, value in flags.items())
    for one, other in zip(mine["state"].values(), theirs["state"].values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)
    plain.load_state_dict(mine)
    ours.load_state_dict(theirs)
    assert ours.state_dict()["param_groups"] == mine["param_groups"]


def test_inside_a_window_nothing_moves_and_that_is_said():
    accelerator, model, optimizer = parts(gradient_accumulation_steps=2)
    moved = []
    for _ in range(4):
        before = model.weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            assert optimizer.step() is None
            optimizer.zero_grad()
        moved.append(
            (not torch.equal(before, model.weight), optimizer.step_was_skipped, model.weight.grad is None)
        )
    assert moved == [(False, True, False), (True, False, True)] * 2


def test_hooks_reach_the_optimizer_itself():
    accelerator, model, optimizer = parts()
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after", "saving", "saved", "loading", "loaded"]


def test_a_scheduler_can_be_built_on_the_prepared_optimizer(recwarn):
    accelerator, model, optimizer = parts()
    scheduler = accelerator.prepare(LambdaLR(optimizer, lambda step: 0.5**step))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_it_can_be_pickled_and_copied():
    _, _, optimizer = parts()
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert isinstance(twin, AcceleratedOptimizer)
        assert twin.param_groups[0]["lr"] == 0.1
        twin.step()


def test_set_to_none_is_refused_where_the_optimizer_does_not_know_it():
    class Old(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    model = torch.nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(Old(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="zero_grad of Old has no set_to_none"):
        optimizer.zero_grad(set_to_none=True)
    keeping = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 1)).sum().backward()
    keeping.zero_grad(set_to_none=False)
    assert model.weight.grad.item() == 0


def test_train_and_eval_are_passed_on_where_they_exist():
    class Free(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    model = torch.nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(Free(model.parameters(), lr=0.1))
    optimizer.train()
    assert optimizer.optimizer.mode == "train"
    optimizer.eval()
    assert optimizer.optimizer.mode == "eval"
    plain = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain.train()
    plain.eval()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_an_overflow_in_fp16_skips_the_step_and_says_so(fused, clip):
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum() * float("inf"))
    if clip:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(before, model.weight)
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("fused", [False, True])
def test_one_built_by_hand_uses_its_scaler(fused):
    model = torch.nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), scaler=scaler)
    scaler.scale(model(torch.ones(1, 1)).sum() * float("nan")).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    before = model.weight.item()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert before - model.weight.item() == pytest.approx(0.1, abs=1e-6)


def test_states_move_with_their_tensors():
    moved = move_to_device({"a": [torch.ones(1), 3]}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == 3


def test_a_patched_step_says_that_it_was_called():
    _, _, optimizer = parts()
    step = patch_optimizer_step(optimizer, optimizer.optimizer.step)
    assert not optimizer._accelerate_step_called
    step()
    assert optimizer._accelerate_step_called
