"""Real processes that are killed and resumed: the same run bit for bit, and on another number of processes the same samples."""

from __future__ import annotations

import os
import random
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_together import check_on_every_rank, drawn
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from acc_ops.random import set_seed
from acc_ops.testing import RankFailed, run_processes, run_threads
from acc_ops.world import current_world
from acc_plugins.options.kwargs import DistributedDataParallelKwargs
from acc_plugins.options.project import ProjectConfiguration
from acc_trainer.accelerator import Accelerator

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills by signal")
EPOCHS, SIZE = 3, 41


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Tensor:
        return torch.cat([torch.tensor([float(place)]), torch.rand(10)])


class Net(nn.Module):
    """Several buckets, and gradients that do not come in the order of the parameters: DDP regroups them after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(300, 1), nn.Linear(10, 300)
        self.middle, self.behind = nn.Linear(300, 300), nn.Linear(300, 300)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        out: Tensor = self.last(self.drop(self.behind(hidden)).tanh())
        return out


@dataclass(frozen=True)
class Life:
    """A run that saves every so many steps, and comes to its end some steps behind a save: which step, and which rank is killed."""

    save_every: int
    further: int
    rank: int

    @property
    def last(self) -> int:
        return self.save_every + self.further

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint: in the last step nothing is saved."""
        return (self.last - 1) // self.save_every * self.save_every


# steps 5 a rank and epoch, of 15: in the first two epochs, at their ends, inside a window or behind it
LIVES = st.builds(Life, save_every=st.integers(1, 4), further=st.integers(1, 6), rank=st.integers(0, 2))


def _train(folder: str, save_every: int = 0, leave_at: int = 0, killed: int | None = None) -> list[Any]:
    """Train from the newest checkpoint in `folder`, at most to step `leave_at`, at which rank `killed` dies. The samples this rank saw, and the weights."""
    torch.set_num_threads(1)
    set_seed(3, device_specific=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
    )
    net = Net()
    prepared = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=0.003), DataLoader(Samples(), 3, shuffle=True)
    )
    model, optimizer, train = prepared
    assert isinstance(model, DistributedDataParallel) == (accelerator.num_processes > 1)
    if any(Path(folder).glob("checkpoints/checkpoint_*")):
        accelerator.load_state()
    seen = []
    for epoch in range(train.iteration, EPOCHS):
        for batch in accelerator.rest_of_epoch(train):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, 1:]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            rows = len(batch) - train.position.padding
            seen.append([accelerator.step, epoch, batch[:rows, 0].tolist()])
            if accelerator.step == leave_at:
                if killed == accelerator.process_index:
                    os.kill(os.getpid(), signal.SIGKILL)
                if killed is None:
                    accelerator.end_training()
                    return []
            if save_every and accelerator.step % save_every == 0:
                accelerator.save_state()
    weights = [parameter.tolist() for parameter in net.parameters()]
    moments = [entry["exp_avg"].tolist() for entry in optimizer.state_dict()["state"].values()]
    random_numbers = [torch.rand(3).tolist(), random.random()]
    accelerator.end_training()
    return [seen, weights, moments, random_numbers]


def _whole_then_left_then_killed(folder: str, life: Life) -> None:
    whole = _train(f"{folder}/whole")
    torch.save(whole, f"{folder}/whole_{current_world().rank}.pt")
    lives: list[Life] = []

    def left(life: Life) -> None:
        lives.append(life)
        home = f"{folder}/left_{len(lives)}"
        _train(home, life.save_every, life.last)
        _assert_same(_train(home, life.save_every), whole, life)

    check_on_every_rank(left, LIVES, number=3)
    _train(f"{folder}/killed", life.save_every, life.last, life.rank)


def _assert_same(resumed: list[Any], whole: list[Any], life: Life) -> None:
    assert resumed[0] == [one for one in whole[0] if one[0] > life.saved], f"other samples, {life}"
    assert resumed[1:] == whole[1:], f"other weights, moments or random numbers, {life}"


def _resumed_then_others(folder: str) -> tuple[list[Any], list[Any], list[str]]:
    resumed = _train(f"{folder}/killed", 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dealt = _train(f"{folder}/alone")
    return resumed, dealt, [str(one.message) for one in said]


def _rows(seen: list[Any], epoch: int) -> list[float]:
    return [row for _, of, rows in seen if of == epoch for row in rows]


def test_three_processes_killed_in_the_middle_are_the_run_that_never_died(tmp_path: Path) -> None:
    life = drawn(LIVES, 5)[-1]  # one kill costs a group of processes
    with pytest.raises(RankFailed, match=r"exit code -9|raised"):
        run_processes(3, _whole_then_left_then_killed, str(tmp_path), life)
    before = {path.name for path in tmp_path.glob("killed/checkpoints/*")}
    assert f"checkpoint_{life.saved // life.save_every - 1}" in before, (before, life)

    # one process reads the first part of an epoch, whose order it drew from torch's generator
    def alone() -> list[Any]:
        class Enough(Exception):
            pass

        seen: list[Any] = []
        torch.manual_seed(5)
        project = ProjectConfiguration(project_dir=tmp_path / "alone", automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
        net = Net()
        model, optimizer, train = accelerator.prepare(
            net, torch.optim.Adam(net.parameters(), lr=0.003), DataLoader(Samples(), 2, shuffle=True)
        )
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, 1:]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            seen += batch[:, 0].tolist()
            if accelerator.step == 7:
                accelerator.save_state()
                break
        accelerator.end_training()
        return seen

    (first,) = run_threads(1, alone)
    results = run_processes(3, _resumed_then_others, str(tmp_path))
    for rank, (resumed, _, _) in enumerate(results):
        whole = torch.load(tmp_path / f"whole_{rank}.pt")
        _assert_same(resumed, whole, life)

    rest = [row for _, (seen, *_), _ in results for row in _rows(seen, 0)]
    assert sorted(first + rest) == list(range(SIZE))
    following = [row for _, (seen, *_), _ in results for row in _rows(seen, 1)]
    assert sorted(following) == list(range(SIZE))
    for _, _, said in results:
        text = next(one for one in said if "saved by 1 processes, now there are 3" in one)
        assert "micro-batches of the accumulation window" in text
        assert "random generators" in text
