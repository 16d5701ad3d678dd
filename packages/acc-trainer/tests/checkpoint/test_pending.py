"""What a checkpoint has not got is named once; what could run code is refused with the way to trust it; counters go on."""

from __future__ import annotations

import json
import random
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_trainer import Accelerator, GeneralTracker
from acc_trainer.checkpoint import CheckpointError, load_custom_state, save_custom_state
from acc_trainer.checkpoint.torch_files import read_random
from acc_trainer.data.loader import DataLoaderShard
from acc_trainer.data.samplers import SeedableRandomSampler
from acc_trainer.data.shard import IterableDatasetShard
from acc_trainer.grad_sync import GradSync


class Kept:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_all_that_is_missing_is_in_one_warning_on_every_rank(tmp_path):
    def build(precision):
        accelerator = Accelerator(mixed_precision=precision)
        accelerator.prepare(torch.nn.Linear(2, 2), DataLoader(range(4)))
        return accelerator

    def old():
        build("no").save_state(str(tmp_path / "c"))

    run_threads(2, old)
    for name in (
        "manifest.json",
        *(f"{kind}_{rank}" for kind in ("progress", "random_states") for rank in (0, 1)),
    ):
        path = tmp_path / "c" / name
        (path if path.exists() else next((tmp_path / "c").glob(f"{name}.*"))).unlink()

    def load():
        build("fp16").load_state(str(tmp_path / "c"))

    with pytest.warns(UserWarning, match="does not hold all of this run") as said:
        run_threads(2, load)
    texts = [str(one.message) for one in said if "does not hold all" in str(one.message)]
    assert len(texts) == 2
    assert len(set(texts)) == 1
    names = [
        "scaler.pt",
        *(f"{one}_{rank}" for one in ("random_states", "progress") for rank in (0, 1)),
    ]
    assert [texts[0].count(name) for name in names] == [1] * 5


def test_objects_that_could_run_code_need_trust_that_is_said(tmp_path):
    accelerator = Accelerator()
    kept = Kept(random.Random(3))
    accelerator.register_for_checkpointing(kept)
    accelerator.save_state(str(tmp_path / "c"))
    want, kept.value = kept.value.random(), None
    with pytest.raises(
        CheckpointError,
        match=r"custom_checkpoint_0\.pkl holds objects .*random\.Random.*safe_globals.*weights_only",
    ):
        accelerator.load_state(str(tmp_path / "c"))
    assert kept.value is None
    accelerator.load_state(str(tmp_path / "c"), load_kwargs={"weights_only": False})
    assert kept.value.random() == want
    kept.value = None
    with torch.serialization.safe_globals([random.Random]):
        accelerator.load_state(str(tmp_path / "c"))
    assert kept.value.random() == want
    save_custom_state(kept, tmp_path)
    with pytest.raises(CheckpointError, match="safe_globals"):
        load_custom_state(kept, tmp_path)


def test_arrays_and_numbers_of_numpy_need_no_trust(tmp_path):
    numpy = pytest.importorskip("numpy")
    accelerator = Accelerator()
    kept = Kept([numpy.arange(3.0), numpy.float32(2.5), numpy.array([True])])
    accelerator.register_for_checkpointing(kept)
    accelerator.save_state(str(tmp_path / "c"))
    kept.value = None
    accelerator.load_state(str(tmp_path / "c"))
    assert [numpy.asarray(one).tolist() for one in kept.value] == [[0.0, 1.0, 2.0], 2.5, [True]]


def test_a_schedule_knows_after_a_resume_that_its_optimizer_had_moved(tmp_path):
    def build():
        accelerator = Accelerator(mixed_precision="fp16")
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return accelerator, model, optimizer, schedule

    def step(run, overflow=False):
        accelerator, model, optimizer, _ = run
        accelerator.backward(model(torch.ones(1, 1)).sum() * 1e-3)
        if overflow:
            model.weight.grad.fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    run = build()
    step(run)
    run[0].save_state(str(tmp_path / "c"))
    step(run, overflow=True)
    run[3].step()  # once an epoch: the first of its two updates counts
    again = build()
    again[0].load_state(str(tmp_path / "c"))
    step(again, overflow=True)
    assert again[0].optimizer_step_was_skipped
    again[3].step()
    assert again[3].get_last_lr() == run[3].get_last_lr() == [0.5]


class Counting(GeneralTracker):
    """Counts steps as wandb does."""

    name, requires_logging_directory, counts_steps = "counting", False, True

    def __init__(self):
        super().__init__()
        self.steps = []

    @property
    def tracker(self):
        return self

    def log(self, values, step=None, **kwargs):
        self.steps.append(step)


@pytest.mark.parametrize("early", [True, False])
def test_steps_of_trackers_go_on_where_the_checkpoint_was(tmp_path, early):
    first = Accelerator(log_with=Counting())
    first.init_trackers("run")
    first.log({"a": 1})
    first.log({"a": 1}, step=6)
    first.save_state(str(tmp_path / "c"))
    tracker = Counting()
    again = Accelerator(log_with=tracker)
    if early:
        again.load_state(str(tmp_path / "c"))
    again.init_trackers("run")
    if not early:
        again.load_state(str(tmp_path / "c"))
    for step in (None, None, 20, None):
        again.log({"a": 1}, step=step)
    assert tracker.steps == [7, 8, 20, 21]
    again.init_trackers("another")
    again.log({"a": 1})
    assert tracker.steps[-1] is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_the_sampler_beside_a_stream_that_is_split_has_the_file_of_the_specification(tmp_path):
    def build(seed, epoch):
        accelerator = Accelerator()
        made = DataLoaderShard(IterableDatasetShard(Stream(), 2), batch_size=2)
        made._grad_sync = GradSync()
        sampler = SeedableRandomSampler(range(8), data_seed=seed)
        sampler.set_epoch(epoch)
        made.base_dataloader.__dict__["sampler"] = sampler
        made.base_dataloader.__dict__["batch_sampler"] = None
        accelerator._dataloaders.append(made)
        return accelerator, sampler

    build(5, 3)[0].save_state(str(tmp_path / "c"))
    assert torch.load(tmp_path / "c" / "sampler.bin", weights_only=True) == {"initial_seed": 5, "epoch": 3}
    accelerator, sampler = build(1, 0)
    accelerator.load_state(str(tmp_path / "c"))
    assert (sampler.initial_seed, sampler.epoch) == (5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (tmp_path / "c" / "manifest.json").unlink()
        torch.save(
            SeedableRandomSampler(range(8), data_seed=9), tmp_path / "c" / "sampler.bin"
        )  # as accelerate writes it
        with pytest.raises(CheckpointError, match=r"sampler\.bin holds objects"):
            accelerator.load_state(str(tmp_path / "c"))
        accelerator.load_state(str(tmp_path / "c"), load_kwargs={"weights_only": False})
    assert sampler.initial_seed == 9


def _run():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, _, _ = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(Kept(1))
    return accelerator, model


def _inside_a_window(accelerator, model):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("content", [[1, 2], {"other": 1}], ids=["a list", "another dict"])
@pytest.mark.parametrize("name", ["scaler.pt", "scheduler.bin", "progress_0.bin", "gradients_0.bin"])
def test_a_file_with_another_content_is_named_before_anything_is_loaded(tmp_path, name, content):
    accelerator, model = _run()
    _inside_a_window(accelerator, model)
    accelerator.save_state(str(tmp_path / "c"))
    accelerator.end_training()
    torch.save(content, tmp_path / "c" / name)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    manifest["files"][name]["bytes"] = (tmp_path / "c" / name).stat().st_size
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    accelerator, model = _run()
    before = [p.tolist() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=rf"{name} cannot be loaded: it (holds a list|has no )"):
        accelerator.load_state(str(tmp_path / "c"))
    assert [p.tolist() for p in model.parameters()] == before
    accelerator.end_training()


def test_an_object_that_cannot_take_its_state_is_named_with_the_file_and_what_that_means(tmp_path):
    accelerator, _ = _run()
    accelerator.save_state(str(tmp_path / "c"))
    accelerator._custom_objects[0].load_state_dict = lambda state: state["other"]
    with pytest.raises(
        CheckpointError,
        match=r"Kept could not take its state from .*custom_checkpoint_0\.pkl \(KeyError.*parts of two",
    ):
        accelerator.load_state(str(tmp_path / "c"))
    accelerator.end_training()


def test_random_states_that_hold_nothing_are_told(tmp_path):
    torch.save({}, tmp_path / "random_states_0.pkl")
    with pytest.warns(UserWarning, match="random generators go on as they are: .* holds none"):
        assert read_random(tmp_path / "random_states_0.pkl") == {}
