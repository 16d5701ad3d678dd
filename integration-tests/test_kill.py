"""A run that is killed at any moment leaves a whole checkpoint, and resumes as if it had never been killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from acc_trainer.checkpoint import check_whole, newest_whole

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills by signal, and forks")
KILLS = 50
LIMIT_S = 120


def _save_for_ever(folder, named, ready):
    """Resume from the newest checkpoint, then save in a loop; every part of one checkpoint carries the same number."""
    from acc_plugins.options.project import ProjectConfiguration
    from acc_trainer.accelerator import Accelerator

    torch.set_num_threads(1)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=not named, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(400, 400)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    counter = _Counter()
    accelerator.register_for_checkpointing(counter)
    if newest_whole(_home(folder, named)) is not None:
        accelerator.load_state(os.path.join(folder, "latest") if named else None)
        assert model.weight[0, 0].item() == counter.value
    ready.set()
    while True:
        counter.value += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(counter.value)
                parameter.grad = torch.full_like(parameter, counter.value)
        optimizer.step()
        accelerator.save_state(os.path.join(folder, "latest") if named else None)


class _Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _warm_up():
    """Load here what every forked process would load again (torch's optimizers load a second's worth of modules)."""
    import acc_trainer.accelerator
    import acc_trainer.checkpoint.write  # noqa: F401

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).step()


def _home(folder, named):
    return folder if named else os.path.join(folder, "checkpoints")


@pytest.mark.parametrize("named", [True, False], ids=["one folder", "automatic names, limit 1"])
def test_a_process_killed_at_random_moments_never_loses_or_mixes_a_checkpoint(tmp_path, named):
    from safetensors.torch import load_file

    _warm_up()
    chance = random.Random(17)
    fork = multiprocessing.get_context("fork")
    newest, leftovers, latest_s = 0, 0, 0.06
    for _ in range(KILLS):
        ready = fork.Event()
        process = fork.Process(target=_save_for_ever, args=(str(tmp_path), named, ready))
        process.start()
        assert ready.wait(LIMIT_S)
        time.sleep(chance.uniform(0.0, latest_s))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the saving process ended by itself"
        leftovers += any(name.endswith(".writing") for name in os.listdir(_home(str(tmp_path), named)))
        folder = newest_whole(_home(str(tmp_path), named))
        if folder is None:
            assert newest == 0
            latest_s *= 1.2  # a busy machine has not yet come to the end of one save
            continue
        check_whole(folder, checksums=True)
        value = torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True)["value"]
        weights = load_file(folder / "model.safetensors")
        assert all(bool((tensor == value).all()) for tensor in weights.values())
        assert value >= newest, "a checkpoint that was there has been lost"
        latest_s *= 1.0 if value > newest else 1.2
        newest = value
    assert newest > KILLS / 4
    assert leftovers > 0, "no kill came in the middle of a save: this test has shown nothing"


TRAIN = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from acc_plugins.options.project import ProjectConfiguration
from acc_trainer.accelerator import Accelerator

folder, resume, slow = sys.argv[1], sys.argv[2] == "resume", float(sys.argv[3])
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2),
)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.7)
data = torch.randn(68, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
done, first, skip = 0, 0, 0
class Progress:
    def state_dict(self): return {"epoch": epoch, "batch": batch + 1}
    def load_state_dict(self, state):
        global first, skip
        first, skip = state["epoch"], state["batch"]
accelerator.register_for_checkpointing(Progress())
if resume:
    accelerator.load_state()
for epoch in range(first, 3):
    batches = accelerator.skip_first_batches(loader, skip) if skip else loader
    for batch, (x, y) in enumerate(batches, start=skip):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.save_state()
            if accelerator.is_main_process:
                print(f"SAVED {epoch} {batch}", flush=True)
            time.sleep(slow)
    skip = 0
weights = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]
if accelerator.is_main_process:
    import json
    json.dump(weights, open(os.path.join(folder, "weights.json"), "w"))
accelerator.end_training()
"""


def _launch(script, folder, *words):
    command = [sys.executable, "-m", "acc_trainer.cli.main", "launch", "--cpu", "--num_processes", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(script), str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def test_a_training_of_two_ranks_killed_in_an_epoch_resumes_to_the_same_weights_bit_for_bit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = _launch(script, tmp_path / "whole", "fresh", "0")
    out, err = undisturbed.communicate(timeout=LIMIT_S)
    assert undisturbed.returncode == 0, out + err
    killed = _launch(script, tmp_path / "killed", "fresh", "0.05")
    for line in killed.stdout:
        if line.startswith("SAVED 1 3"):
            break
    killed.kill()  # the guardian ends the ranks
    killed.communicate(timeout=LIMIT_S)
    assert not (tmp_path / "killed" / "weights.json").exists()
    resumed = _launch(script, tmp_path / "killed", "resume", "0")
    out, err = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, out + err
    assert "SAVED 0" not in out, "the resumed run began anew"
    assert "SAVED 2" in out
    first, second = (
        json.loads((tmp_path / name / "weights.json").read_text()) for name in ("whole", "killed")
    )
    assert first == second


def _both_ways(folder, bucket_view):
    return [_saved_inside_a_window_goes_on(folder, bucket_view, each) for each in (False, True)]


def _saved_inside_a_window_goes_on(folder, bucket_view, each):
    """Whether a DDP run that is loaded after 4 of 9 micro-batches (windows of 3) ends like the one that went on."""
    from acc_plugins.options.accumulation import GradientAccumulationPlugin
    from acc_plugins.options.kwargs import DistributedDataParallelKwargs
    from acc_trainer.accelerator import Accelerator

    def prepared():
        torch.manual_seed(3)
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=each),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=bucket_view)],
        )
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))

    def train(run, first, save_at=None):
        accelerator, model, optimizer = run
        for batch in range(first, 9):
            if batch == save_at:
                accelerator.save_state(folder)
            with accelerator.accumulate(model):
                seed = 10 * batch + accelerator.process_index
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [p.tolist() for p in model.parameters()]

    run = prepared()
    straight = train(run, 0, save_at=4)
    run[0].load_state(folder)  # back to where it was: gradients that are views of buckets are overwritten
    again = train(run, 4)
    resumed = prepared()
    resumed[0].load_state(folder)
    return type(run[1]).__name__, again == straight, train(resumed, 4) == straight


@pytest.mark.parametrize("bucket_view", [False, True])
def test_two_ddp_ranks_saved_inside_a_window_go_on_bit_for_bit(tmp_path, bucket_view):
    from acc_ops.testing import run_processes

    want = [("DistributedDataParallel", True, True)] * 2
    assert run_processes(2, _both_ways, str(tmp_path / "c"), bucket_view) == [want, want]


MAIN_ONLY = """
import sys, torch
from acc_trainer.accelerator import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if sys.argv[2] == "save":
    if accelerator.is_main_process:
        accelerator.save_state(sys.argv[1] + "/c", wait_s=1)
else:
    def hook(models, weights, folder):
        if accelerator.process_index == 1:
            raise ZeroDivisionError("in the hook")
        accelerator.wait_for_everyone()
    from acc_trainer.checkpoint import meeting
    meeting.WAIT_S = 2.0
    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(sys.argv[1] + "/c")
accelerator.backward(model(torch.ones(1, 2)).sum())
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "save",
            "save_state must be called on every rank; rank 1 did not come within 1 s: drop the `if is_main",
        ),
        ("hook", "rank 1 failed while collecting the weights, and the other ranks are still at it"),
    ],
)
def test_ranks_that_do_not_come_together_end_with_the_reason(tmp_path, fault, said):
    script = tmp_path / "train.py"
    script.write_text(MAIN_ONLY)
    process = _launch(script, tmp_path, fault)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, err
    assert said in err
