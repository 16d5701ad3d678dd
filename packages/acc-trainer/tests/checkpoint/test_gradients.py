"""A run that is saved inside an accumulation window goes on with the window's gradients, bit for bit."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from acc_ops.testing import run_threads
from acc_plugins import UnsupportedError
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.kwargs import GradScalerKwargs
from acc_plugins.strategies.strategy import Strategy
from acc_trainer import Accelerator
from acc_trainer.checkpoint import CheckpointError
from acc_trainer.state import AcceleratorState

DRAWING = threading.Lock()  # ranks that are threads share torch's generator


def _prepared(steps=4, each=False, precision="no"):
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
    accelerator = Accelerator(
        gradient_accumulation_plugin=plugin,
        mixed_precision="fp16" if precision == "off" else precision,
        kwargs_handlers=[GradScalerKwargs(enabled=precision != "off")],
    )
    with DRAWING:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    unused = torch.nn.Parameter(torch.ones(2))
    model.register_parameter("unused", unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


def _train(prepared, first, last, save_at=None, folder=None):
    accelerator, model, optimizer = prepared
    for batch in range(first, last):
        if batch == save_at:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            seed = 100 * batch + accelerator.process_index
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_a_run_saved_anywhere_in_a_window_goes_on_bit_for_bit(tmp_path, cut, ranks, each):
    def work():
        straight = _train(_prepared(each=each), 0, 9, save_at=cut, folder=str(tmp_path / "c"))
        resumed = _prepared(each=each)
        resumed[0].load_state(str(tmp_path / "c"))
        return _train(resumed, cut, 9) == straight

    assert all(run_threads(ranks, work) if ranks > 1 else [work()])


def test_gradients_are_written_only_inside_a_window(tmp_path):
    prepared = _prepared(steps=2)
    _train(prepared, 0, 1)
    prepared[0].save_state(str(tmp_path / "open"))
    _train(prepared, 1, 2)
    prepared[0].save_state(str(tmp_path / "closed"))
    assert (tmp_path / "open" / "gradients_0.bin").is_file()
    assert not (tmp_path / "closed" / "gradients_0.bin").exists()


def test_a_parameter_that_only_the_optimizer_knows_keeps_its_gradient_too(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    scale = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([scale], lr=0.1))
    with accelerator.accumulate():
        accelerator.backward((3 * scale).sum())
        optimizer.step()
    want = scale.grad.clone()
    accelerator.save_state(str(tmp_path / "c"))
    scale.grad = None
    accelerator.load_state(str(tmp_path / "c"))
    assert torch.equal(scale.grad, want)


def test_going_back_drops_the_gradients_that_came_since_and_keeps_the_tensors(tmp_path):
    prepared = _prepared()
    accelerator, model, _ = prepared
    _train(prepared, 0, 1)
    accelerator.save_state(str(tmp_path / "c"))
    first = model[0].weight.grad
    want = first.clone()
    _train(prepared, 1, 3)
    model.unused.grad = torch.ones(2)
    accelerator.load_state(str(tmp_path / "c"))
    assert model[0].weight.grad is first  # it may be a view of a DDP bucket
    assert torch.equal(first, want)
    assert model.unused.grad is None
    assert model[0].weight.grad.dtype == model[0].weight.dtype


def test_a_closed_window_leaves_no_gradients_of_another_one(tmp_path):
    prepared = _prepared()
    prepared[0].save_state(str(tmp_path / "c"))
    _train(prepared, 0, 3)
    prepared[0].load_state(str(tmp_path / "c"))
    assert all(p.grad is None for p in prepared[1].parameters())


def test_another_number_of_ranks_loses_the_half_window_and_every_rank_says_so(tmp_path):
    prepared = _prepared()
    _train(prepared, 0, 3)
    prepared[0].save_state(str(tmp_path / "c"))

    def load():
        resumed = _prepared()
        resumed[1][0].weight.grad = torch.ones(4, 3)
        resumed[0].load_state(str(tmp_path / "c"))
        return resumed[0].grad_sync.index, resumed[0].grad_sync.sync, resumed[1][0].weight.grad

    with pytest.warns(UserWarning, match="saved by 1 processes, now there are 2") as warned:
        assert run_threads(2, load) == [(0, True, None)] * 2
    texts = [str(one.message) for one in warned]
    assert sum("micro-batches of the accumulation window" in text for text in texts) == 2


def test_gradients_of_another_model_are_refused_before_anything_is_touched(tmp_path):
    prepared = _prepared()
    _train(prepared, 0, 1)
    prepared[0].save_state(str(tmp_path / "c"))
    accelerator, model, *_ = _prepared()
    model[0].weight = torch.nn.Parameter(torch.zeros(5, 3))  # which its optimizer does not train
    before = model[0].weight.clone()
    with pytest.raises(
        CheckpointError,
        match=r"a gradient of shape \(4, 3\) for 0.weight of model, this run has one of shape \(5, 3\)",
    ):
        accelerator.load_state(str(tmp_path / "c"))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_that_was_broken_off_can_still_be_stepped_after_a_resume(tmp_path, ranks):
    def finish(prepared):
        """The step that is left over, and an epoch that begins with a new window."""
        optimizer = prepared[2]
        optimizer.step()
        optimizer.zero_grad()
        return _train(prepared, 10, 14)

    def work():
        prepared = _prepared()
        accelerator, model, optimizer = prepared
        for batch in accelerator.prepare(torch.utils.data.DataLoader(torch.ones(12, 3), 1)):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.grad_sync.index == 2:
                break
        accelerator.save_state(str(tmp_path / "c"))
        straight = finish(prepared)
        resumed = _prepared()
        resumed[0].prepare(torch.utils.data.DataLoader(torch.ones(12, 3), 1))
        resumed[0].load_state(str(tmp_path / "c"))
        assert any(p.grad is not None for p in resumed[1].parameters())
        return finish(resumed) == straight

    assert all(run_threads(ranks, work) if ranks > 1 else [work()])


def _saved_in_a_window(folder, precision="no"):
    prepared = _prepared(precision=precision)
    _train(prepared, 0, 2)
    prepared[0].save_state(folder)


def test_gradients_that_are_out_of_reach_are_told_when_they_are_lost(tmp_path, monkeypatch):
    def hidden(self, model):
        raise UnsupportedError("this torch hides them")

    with monkeypatch.context() as patch:
        patch.setattr(Strategy, "gradient_places", hidden)
        with pytest.warns(
            UserWarning, match=r"gradients of model are out of reach \(this torch hides them\)"
        ):
            _saved_in_a_window(str(tmp_path / "c"))
    resumed = _prepared()
    resumed[1][0].weight.grad = torch.ones(4, 3)
    with pytest.warns(
        UserWarning, match="accumulation window in which it was saved .* out of reach: this torch"
    ):
        resumed[0].load_state(str(tmp_path / "c"))
    assert resumed[0].grad_sync.index == 0
    assert resumed[1][0].weight.grad is None
    assert len(_train(resumed, 2, 9)) == 5


def test_another_layout_of_gradients_loses_the_window_and_says_so(tmp_path, monkeypatch):
    _saved_in_a_window(str(tmp_path / "c"))
    monkeypatch.setattr(Strategy, "gradient_layout", lambda self, model: "in shards")
    resumed = _prepared()
    with pytest.warns(UserWarning, match="saved with whole gradients for model, now it is in shards"):
        resumed[0].load_state(str(tmp_path / "c"))
    assert (resumed[0].grad_sync.index, resumed[0].grad_sync.sync) == (0, True)


@pytest.mark.parametrize(
    ("saved", "now"), [("fp16", "no"), ("no", "fp16"), ("fp16", "fp16"), ("fp16", "off"), ("off", "fp16")]
)
def test_gradients_that_were_scaled_are_not_given_to_a_run_that_scales_none_nor_the_other_way_round(
    tmp_path, saved, now
):
    _saved_in_a_window(str(tmp_path / "c"), saved)
    AcceleratorState._reset_state(True)  # as a new process does
    resumed = _prepared(precision=now)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed[0].load_state(str(tmp_path / "c"))
    told = " ".join(str(one.message) for one in said)
    assert ("micro-batches of the accumulation window" in told) == (saved != now)
    assert told.count("scaler.pt") == (saved != now)
    assert resumed[0].grad_sync.index == (0 if saved != now else 2)
    assert (resumed[1][0].weight.grad is None) == (saved != now)
