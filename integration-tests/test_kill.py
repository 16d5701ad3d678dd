"""A run that is killed at any moment leaves a whole checkpoint, and resumes as if it had never been killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills by signal, and forks")
KILLS = 24
LIMIT_S = 120


def test_a_sample_of_the_kill_campaign_finds_nothing_lost_mixed_or_unreadable(root, capsys):
    """`hatch run campaign` makes hundreds of kills (tools/campaign.py)."""
    campaign = subprocess.run(
        [sys.executable, str(root / "tools" / "campaign.py"), "--kills", str(KILLS), "--sharded"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with capsys.disabled():
        print(f"\n  {' '.join(campaign.stdout.split())[:300]}", end="", flush=True)
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    assert re.search(r"[1-9]\d* while saving", campaign.stdout), "no kill came in the middle of a save"


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
