"""A run that is killed at any step and resumed is the run that was never killed: weights, states, losses and samples, bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
import random
import shutil
import warnings

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from acc_ops.random import set_seed
from acc_ops.testing import run_threads
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.kwargs import GradScalerKwargs
from acc_trainer.accelerator import Accelerator

EPOCHS, SIZE = 3, 14
has_torchdata = importlib.util.find_spec("torchdata") is not None


class Samples(Dataset):
    """With `noise` each sample that is read draws from two of the global generators."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return SIZE

    def __getitem__(self, place):
        drawn = torch.rand(()).item() + random.random() if self.noise else 0.0
        return torch.tensor([place, place % 3, drawn, 1.0])


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.samples[(place + self.epoch) % SIZE] for place in range(first, SIZE, step))


class Drawn(Sampler):
    """A sampler of a user's own."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(random.sample(range(SIZE), SIZE))


class Uneven(BatchSampler):
    """Batches of a user's own, of 1 and 3 samples in turn."""

    def __init__(self):
        pass

    def __len__(self):
        return sum(1 for _ in self)

    def __iter__(self):
        places = iter(range(SIZE))
        for size in itertools.cycle((1, 3)):
            if not (batch := list(itertools.islice(places, size))):
                return
            yield batch


class Average:
    """A moving average of weights, registered by its name."""

    def __init__(self, model):
        self.mean = [p.detach().clone() for p in model.parameters()]

    def update(self, model):
        for mean, parameter in zip(self.mean, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = [tensor.clone() for tensor in state["mean"]]


def loader_of(kind, *, workers, kept, noise):
    data = Samples(noise)
    reading = {"num_workers": workers, "persistent_workers": kept}
    if kind in ("stream", "dispatched stream"):
        return DataLoader(Stream(data), 3, **reading)
    if kind == "own batches":
        return DataLoader(data, batch_sampler=Uneven(), **reading)
    if kind == "own sampler":
        return DataLoader(data, 3, sampler=Drawn(), **reading)
    if kind == "generator":
        return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(8), **reading)
    return DataLoader(data, 3, shuffle=True, **reading)


class Script:
    """A training script: two models, each with an optimizer and a schedule, and an average."""

    def __init__(
        self,
        kind="shuffled",
        *,
        ranks=1,
        accumulate=1,
        mean=False,
        precision="no",
        workers=0,
        kept=False,
        noise=False,
        stateful=False,
        dropout=0.0,
    ):
        self.kind, self.ranks, self.accumulate, self.precision = kind, ranks, accumulate, precision
        self.kept = kept
        self.workers, self.noise, self.stateful, self.dropout, self.mean = (
            workers,
            noise,
            stateful,
            dropout,
            mean,
        )

    def build(self, seed):
        from acc_plugins.options.accumulation import GradientAccumulationPlugin

        if self.ranks == 1:  # threads share the generators
            set_seed(seed)
        data = DataLoaderConfiguration(
            dispatch_batches="dispatched" in self.kind,
            use_seedable_sampler=self.kind == "seedable" or self.ranks > 1,
            data_seed=5,
            use_stateful_dataloader=self.stateful,
        )
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.accumulate, average_short_window=self.mean
            ),
            dataloader_config=data,
            mixed_precision=self.precision,
            kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=2)]
            if self.precision == "fp16"
            else [],
        )
        own = torch.Generator().manual_seed(1)
        models = [
            torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Dropout(self.dropout)),
            torch.nn.Linear(5, 1),
        ]
        with torch.no_grad():
            for parameter in [p for model in models for p in model.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=own) / 3)
        optimizers = [
            torch.optim.AdamW(models[0].parameters(), lr=0.02),
            torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
        ]
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.05, total_steps=100 * self.ranks),
            torch.optim.lr_scheduler.StepLR(optimizers[1], 2 * self.ranks, 0.9),
        ]
        loader = loader_of(self.kind, workers=self.workers, kept=self.kept, noise=self.noise)
        prepared = accelerator.prepare(*models, *optimizers, *schedules, loader)
        average = Average(models[0])
        accelerator.register_for_checkpointing(average=average)
        return accelerator, prepared, average

    def run(self, folder=None, *, stop=None, resume=False, seed=1):
        """The record of each micro-batch until `stop` is reached (and saved), and the run's end."""
        accelerator, prepared, average = self.build(seed)
        body, head, adam, sgd, cycle, falls, train = prepared
        if resume:
            accelerator.load_state(folder)
        record = []
        for epoch in range(train.iteration, EPOCHS):
            passes = train if self.stateful else accelerator.rest_of_epoch(train)
            for batch in passes:
                with accelerator.accumulate(body, head):
                    loss = (head(body(batch)) - batch[:, 1:2]).square().mean()
                    accelerator.backward(loss)
                    if self.precision == "fp16" and accelerator.step % 5 == 3:  # an overflow
                        next(body.parameters()).grad[0, 0] = float("inf")
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
                    for one in (adam, sgd, cycle, falls):
                        one.step()
                    for one in (adam, sgd):
                        one.zero_grad()
                    average.update(body)
                record.append((accelerator.step, epoch, loss.item(), batch.tolist(), cycle.get_last_lr()))
                if stop == accelerator.step:
                    accelerator.save_state(folder)
                    return record, None
            if stop == -1 - epoch:
                accelerator.save_state(folder)
                return record, None
        scale = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
        end = (
            [p.tolist() for model in (body, head) for p in model.parameters()],
            [
                [value.tolist() if torch.is_tensor(value) else value for value in state.values()]
                for one in (adam, sgd)
                for state in one.state_dict()["state"].values()
            ],
            [tensor.tolist() for tensor in average.mean],
            scale,
            torch.rand(3).tolist() if self.ranks == 1 else None,
            accelerator.step,
        )
        accelerator.end_training()
        return record, end


def of_all_ranks(script, folder, **arguments):
    results = run_threads(script.ranks, lambda: script.run(folder, **arguments))
    return [record for record, _ in results], [end for _, end in results]


CASES = {
    "shuffled, dropout, noise": Script(dropout=0.3, noise=True),
    "accumulated": Script(accumulate=3, dropout=0.2),
    "accumulated, mean of a short window": Script(accumulate=3, mean=True),
    "generator": Script("generator", accumulate=2),
    "seedable": Script("seedable", noise=True),
    "own sampler": Script("own sampler", noise=True),
    "own batches": Script("own batches", accumulate=2, noise=True),
    "stream": Script("stream", noise=True),
    "workers": Script(workers=1),
    "two workers and a stream": Script("stream", workers=2),
    "a worker that stays": Script(workers=1, kept=True, accumulate=3, dropout=0.2),
    "a worker that stays, generator": Script("generator", workers=1, kept=True),
    "stateful, a worker that stays": Script(workers=1, kept=True, stateful=True, accumulate=3, dropout=0.2),
    "two ranks, a worker that stays": Script(ranks=2, workers=1, kept=True, accumulate=3),
    "two ranks, dispatched, a worker that stays": Script("dispatched", ranks=2, workers=1, kept=True),
    "fp16": Script(precision="fp16", dropout=0.1),
    "fp16, accumulated": Script(precision="fp16", accumulate=2),
    "bf16": Script(precision="bf16", dropout=0.1),
    "two ranks": Script(ranks=2, accumulate=2),
    "two ranks, own batches": Script("own batches", ranks=2),
    "three ranks, dispatched": Script("dispatched", ranks=3, accumulate=2),
    "two ranks, dispatched stream": Script("dispatched stream", ranks=2),
    "three ranks, stream": Script("stream", ranks=3),
    "two ranks, fp16": Script(ranks=2, precision="fp16"),
    "stateful": Script(stateful=True, accumulate=2),
    "stateful stream": Script("stream", stateful=True, noise=True),
    "two ranks, stateful": Script(ranks=2, stateful=True),
    "two ranks, stateful, dispatched stream": Script("dispatched stream", ranks=2, stateful=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_it_is_the_run_that_was_never_killed(case, tmp_path):
    script = CASES[case]
    if script.stateful and not has_torchdata:
        pytest.skip("needs torchdata")
    whole, end = of_all_ranks(script, None)
    steps = whole[0][-1][0]
    examples = 1 if script.workers else 3

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        kills=st.lists(st.integers(1, steps) | st.integers(-EPOCHS, -1), min_size=1, max_size=2, unique=True)
    )
    def killed_at(kills):
        shutil.rmtree(tmp_path, ignore_errors=True)
        stops = {_place(stop, whole[0]): stop for stop in kills}
        records, resume = [[] for _ in whole], False
        for at, stop in enumerate([*(stops[place] for place in sorted(stops)), None]):
            more, last = of_all_ranks(script, str(tmp_path / "c"), stop=stop, resume=resume, seed=1 + at)
            for record, new in zip(records, more, strict=True):
                record += new
            resume = True
        assert records == whole
        assert last == end

    if script.kept:  # behind the last batch of a pass, where the next one draws no seed for its workers
        end_of_pass = sum(epoch == 0 for _, epoch, *_ in whole[0])
        killed_at = example(kills=[end_of_pass, end_of_pass + 2])(killed_at)
    killed_at()


def _place(stop, record):
    """Behind how many micro-batches a run stops: at a step, or with `-1 - epoch` behind the loop over an epoch."""
    if stop > 0:
        return stop
    return max(at for at, one in enumerate(record, start=1) if one[1] == -1 - stop)


def test_a_run_that_saves_goes_on_as_one_that_does_not(tmp_path):
    script = Script(dropout=0.3, noise=True, accumulate=2)

    class Saving(Script):
        def build(self, seed):
            accelerator, prepared, average = super().build(seed)
            update = average.update

            def update_and_save(model):
                update(model)
                accelerator.save_state(str(tmp_path / "c"))

            average.update = update_and_save
            return accelerator, prepared, average

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Saving(dropout=0.3, noise=True, accumulate=2).run() == script.run()
