"""Scripts that a launcher starts: a rank that fails ends the others with its error, and runs come one after the other in the same processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LIMIT_S = 100
LAUNCHERS = {
    "acc": ["-m", "acc_trainer.cli.main", "launch", "--cpu", "--num_processes", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.fixture
def launch(tmp_path):
    """Run a script on two processes; the finished process with all that was printed."""

    def run(text, *words, launcher="acc"):
        script = tmp_path / "script.py"
        script.write_text(text)
        return subprocess.run(
            [sys.executable, *LAUNCHERS[launcher], str(script), *words],
            env={
                **os.environ,
                "ACCELERATE_USE_CPU": "true",
                "HF_HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )

    return run


# a rank that fails -----------------------------------------------------------------------------------------------------------

FAILING = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, Dataset
from acc_trainer import Accelerator

how = sys.argv[1]

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        if how == "loader worker" and os.environ["RANK"] == "1" and number > 20:
            raise KeyError("rank 1 fails in a loader worker")
        return torch.ones(4)

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        raise KeyError("rank 1 fails in backward")

def fail(place):
    if how == place and accelerator.process_index == 1:
        raise KeyError(f"rank 1 fails {place}")

accelerator = Accelerator()
fail("before prepare")
loader = DataLoader(Samples(), 4, num_workers=int(how == "loader worker"))
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
fail("after prepare")
for step, x in enumerate(loader):
    fails = step == 2 and accelerator.process_index == 1
    if fails and how == "sys.exit":
        sys.exit(3)
    if fails and how == "os._exit":
        os._exit(5)
    if fails and how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(x).sum()
    accelerator.backward(Fails.apply(loss) if fails and how == "in backward" else loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.gather(loss.detach())
print("never printed")
"""


@pytest.mark.parametrize(
    ("how", "code", "launcher"),
    [
        ("before prepare", 1, "acc"),
        ("after prepare", 1, "acc"),
        ("in backward", 1, "acc"),
        ("in a loader worker", 1, "acc"),
        ("sys.exit", 3, "acc"),
        ("os._exit", 5, "acc"),
        ("SIGKILL", 137, "acc"),
        ("in backward", 1, "torchrun"),
        ("SIGKILL", 1, "torchrun"),
    ],
)
def test_a_failing_rank_ends_the_others_with_its_error(how, code, launcher, launch):
    done = launch(FAILING, how.replace("in a loader", "loader"), launcher=launcher)
    assert done.returncode == code, done.stdout
    assert "never printed" not in done.stdout
    if code == 1 and how != "SIGKILL":
        assert f"KeyError: 'rank 1 fails {how}'" in done.stdout
    if launcher == "acc":
        assert "acc launch: rank 1 (process " in done.stdout


def test_the_main_process_fails_first_and_its_error_is_on_every_process(launch):
    done = launch(
        "from acc_trainer import Accelerator\n"
        "accelerator = Accelerator()\n"
        "with accelerator.main_process_first():\n"
        "    if accelerator.is_main_process:\n"
        "        raise OSError('no such data')\n"
        "    print('never printed')\n"
    )
    assert done.returncode == 1
    assert "never printed" not in done.stdout
    # the other one may be stopped before it has printed what it heard; the launcher names whoever ended first
    assert "OSError: no such data" in done.stdout


# runs one after the other ----------------------------------------------------------------------------------------------------

IN_A_ROW = """
import sys, threading, torch
from acc_trainer import Accelerator, debug_launcher

def work():
    for precision in ("no", "bf16", "no"):
        accelerator = Accelerator(mixed_precision=precision)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        loss = model(torch.full((1, 2), float(accelerator.process_index))).sum()
        accelerator.backward(loss)
        ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        accelerator.print(accelerator.mixed_precision, ranks, next(model.parameters()).grad.tolist())
        del model, loss
        accelerator.free_memory()
        accelerator.end_training()
        joined = torch.distributed.is_initialized()
        accelerator.print("group is left" if not joined else "group stays")

if __name__ == "__main__":
    debug_launcher(work) if len(sys.argv) > 1 else work()
"""


def _three_runs(group):
    return [
        line
        for precision in ("no", "bf16", "no")
        for line in (f"{precision} [0, 1] [[0.5, 0.5]]", f"group {group}")
    ]


def test_each_run_in_a_process_joins_a_new_group(launch):
    done = launch(IN_A_ROW)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == _three_runs("is left")


def test_runs_in_forked_processes_share_the_launchers_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_ROW)
    done = subprocess.run(
        [sys.executable, str(script), "fork"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == _three_runs("stays")
