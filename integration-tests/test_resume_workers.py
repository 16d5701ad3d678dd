"""Runs on two processes whose data comes from workers, which may stay for all passes, left anywhere and resumed twice: the same batches, draws and weights."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_together import check_on_every_rank
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from acc_ops.optional import is_available
from acc_ops.random import set_seed
from acc_ops.testing import run_processes
from acc_plugins import DataLoaderConfiguration
from acc_trainer.accelerator import Accelerator

pytestmark = pytest.mark.skipif(os.name != "posix", reason="gloo processes")
SIZE, EPOCHS, WINDOW = 14, 3, 3


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(place)])


class Stream(IterableDataset[Tensor]):
    """Each worker reads its own share."""

    def _mine(self) -> range:
        worker = get_worker_info()
        return range(SIZE) if worker is None else range(worker.id, SIZE, worker.num_workers)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(place)]) for place in self._mine())


class Remembering(Stream):
    """One that knows where it stands, as torchdata asks."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, mine = self.at, self._mine()
        for self.at in range(begin + 1, len(mine) + 1):
            yield torch.tensor([float(mine[self.at - 1])])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@dataclass(frozen=True)
class Kind:
    data: type[Dataset[Tensor]]
    kept: bool
    stateful: bool = False
    dispatched: bool = False
    workers: int = 2


KINDS = [
    Kind(Rows, kept=True),
    Kind(Stream, kept=True),
    Kind(Stream, kept=False, dispatched=True),
    Kind(Stream, kept=True, dispatched=True),
    Kind(Rows, kept=False, dispatched=True),
]
STATEFUL = [
    Kind(Rows, kept=True, stateful=True),
    Kind(Rows, kept=True, stateful=True, dispatched=True),
    Kind(Stream, kept=True, stateful=True, workers=1),
    Kind(Remembering, kept=True, stateful=True),
    Kind(Remembering, kept=True, stateful=True, dispatched=True),
    Kind(Remembering, kept=False, stateful=True, dispatched=True),
]


@dataclass(frozen=True)
class Plan:
    """At which step a run is saved and left, and how many steps later the resumed one is."""

    first: int
    apart: int


class Run:
    """One life of a training process."""

    def __init__(self, kind: Kind, seed: int) -> None:
        set_seed(seed, device_specific=True)
        loading = DataLoaderConfiguration(
            use_stateful_dataloader=kind.stateful, dispatch_batches=kind.dispatched
        )
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=WINDOW, dataloader_config=loading
        )
        model = torch.nn.Linear(1, 1)
        loader = DataLoader(
            kind.data(),
            2,
            shuffle=True if kind.data is Rows else None,
            num_workers=kind.workers,
            persistent_workers=kind.kept,
            multiprocessing_context="fork",  # a rank was spawned, and would spawn its workers
        )
        prepared = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01), loader)
        self.model, self.optimizer, self.loader = prepared
        self.seen: list[Any] = []

    def train(self, last: int = 0, folder: str = "") -> None:
        """To the end, or to step `last`, where it is saved."""
        accelerator = self.accelerator
        for _ in range(self.loader.iteration, EPOCHS):
            for batch in accelerator.rest_of_epoch(self.loader):
                with accelerator.accumulate(self.model):
                    accelerator.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                position = self.loader.position
                told = (accelerator.step, position.padding, position.is_last, torch.rand(1).item())
                self.seen.append((*told, batch.flatten().tolist()))
                if accelerator.step == last:
                    accelerator.save_state(folder)
                    return

    def end(self) -> list[Any]:
        """The weights. Its workers are ended now, and the threads that spoke to them: Python may wait for ever when it forks beside a thread that ends."""
        self.accelerator.end_training()
        iterator = getattr(self.loader.base_dataloader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(timeout=10)
        return [p.tolist() for p in self.model.parameters()]


def _same_runs(kinds: list[Kind], home: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number, kind in enumerate(kinds):
        whole = Run(kind, 3)
        whole.train()
        weights, steps = whole.end(), whole.accelerator.step
        end = steps // EPOCHS

        def resumed(
            plan: Plan,
            kind: Kind = kind,
            whole: Run = whole,
            weights: list[Any] = weights,
            steps: int = steps,
            folder: str = f"{home}/{number}",
        ) -> None:
            run, seen, done = Run(kind, 3), [], 0
            for turn, step in enumerate((plan.first, min(plan.first + plan.apart, steps - 1))):
                if step > done:
                    run.train(step, f"{folder}_{turn}")
                    done = step
                    seen += run.seen
                    run.end()
                    run = Run(kind, 50 + turn)
                    run.accelerator.load_state(f"{folder}_{turn}")
            run.train()
            last = run.end()
            assert seen + run.seen == whole.seen, kind
            assert last == weights, kind

        # the simplest: saved behind the last batch of an epoch, and in the next one
        places = st.sampled_from([end, *(step for step in range(1, steps) if step != end)])
        plans = st.builds(Plan, first=places, apart=st.integers(1, end))
        check_on_every_rank(resumed, plans, number=2)


def test_workers_of_two_processes_go_on_where_they_would_have_been(tmp_path: Path) -> None:
    kinds = [*KINDS, *STATEFUL] if is_available("torchdata") else KINDS
    run_processes(2, _same_runs, kinds, str(tmp_path), timeout_s=300)
