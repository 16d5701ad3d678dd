"""Saves beside the training on real processes: what they hold, what they cost the ranks' own conversation, and how they fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from acc_ops.testing import run_processes
from acc_plugins.options.project import ProjectConfiguration
from acc_plugins.states.part import TorchFilePart
from acc_trainer.accelerator import Accelerator
from acc_trainer.checkpoint import CheckpointError, check_whole
from acc_trainer.checkpoint.background import Background
from acc_trainer.checkpoint.transaction import Transaction

Run = tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]


def _run_all(checks: list[Callable[[str], object]], folder: str) -> list[object]:
    return [check(os.path.join(folder, check.__name__)) for check in checks]


def _prepared(folder: str, **options: object) -> Run:
    torch.manual_seed(3)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))


def _train(run: Run, steps: int) -> list[object]:
    accelerator, model, optimizer = run
    for step in range(steps):
        seed = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 8, generator=seed)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(torch.tensor([step]))  # the ranks speak while their threads do
    return [parameter.tolist() for parameter in model.parameters()]


def every_save_holds_its_own_moment(folder: str) -> None:
    run = _prepared(folder)
    moments = []
    for _ in range(5):
        moments.append(_train(run, 3))
        run[0].save_state(blocking=False)
    want = _train(run, 4)
    run[0].wait_for_save()
    for number, moment in enumerate(moments):
        path = os.path.join(folder, "checkpoints", f"checkpoint_{number}")
        check_whole(path, checksums=True)
        run[0].load_state(path)
        assert [parameter.tolist() for parameter in run[1].parameters()] == moment
    assert _train(run, 4) == want, "the run goes on from the last one as it did"


def a_limit_of_one_holds(folder: str) -> None:
    run = _prepared(folder, total_limit=1)
    for _ in range(4):
        run[0].save_state(blocking=False)
        _train(run, 2)
    run[0].wait_for_save()
    dist.barrier()
    assert os.listdir(os.path.join(folder, "checkpoints")) == ["checkpoint_3"]


def a_rank_that_cannot_write_is_an_error_on_all(folder: str) -> None:
    run = _prepared(folder)
    run[0].save_state()
    write = TorchFilePart.write
    if run[0].process_index == 1:
        TorchFilePart.write = _no_space
    run[0].save_state(blocking=False)
    _train(run, 2)
    with pytest.raises(
        CheckpointError, match=r"checkpoint_1 failed in the background.*No space left on device"
    ):
        run[0].save_state()
    TorchFilePart.write = write
    dist.barrier()
    assert os.listdir(os.path.join(folder, "checkpoints")) == ["checkpoint_0"]
    assert run[0].save_state(blocking=False).name == "checkpoint_1"
    run[0].wait_for_save()
    check_whole(os.path.join(folder, "checkpoints", "checkpoint_1"), checksums=True)


def _no_space(*_: object) -> list[str]:
    raise OSError(28, "No space left on device")


def shards_are_written_by_all_ranks_at_once(folder: str) -> None:
    """As a sharded strategy does it: a part that all ranks write together, from copies, while they speak."""
    from torch.distributed.checkpoint import load
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from acc_plugins.states.sharded import ShardedPart
    from acc_trainer.checkpoint.manifest import Manifest

    world = Accelerator(cpu=True).world
    mesh = init_device_mesh("cpu", (world.size,))
    local = torch.full((2, 3), float(world.rank))
    weight = DTensor.from_local(local, mesh, [Shard(0)])
    os.makedirs(folder, exist_ok=True)
    background = Background(world)
    transaction = Transaction(Path(folder, "c"))
    transaction.begin(world)
    copies = background.staging.copies([ShardedPart(name="model_0", state={"weight": weight})])
    manifest = Manifest(world_size=world.size)
    background.start(folder, lambda apart: transaction.write(apart, copies, manifest, None), lambda: None)
    local.zero_()
    for _ in range(20):
        world.comm.all_reduce(torch.ones(3))
    background.wait()
    assert len(check_whole(Path(folder, "c"), checksums=True).files) == world.size + 1
    state = {"weight": weight}
    load(state, checkpoint_id=os.path.join(folder, "c", "model_0"))
    assert state["weight"].to_local().tolist() == [[float(world.rank)] * 3] * 2


def test_saves_beside_the_training_on_two_processes(tmp_path):
    checks = [
        every_save_holds_its_own_moment,
        a_limit_of_one_holds,
        a_rank_that_cannot_write_is_an_error_on_all,
        shards_are_written_by_all_ranks_at_once,
    ]
    assert run_processes(2, _run_all, checks, str(tmp_path)) == [[None] * len(checks)] * 2
