"""Ranks forked from Python: they meet, they fail with their own error, and bad values are answered before any fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import os, sys, torch
from acc_trainer.launch.notebook import debug_launcher, notebook_launcher
def work(folder, fail=-1):
    from acc_ops.collectives import gather
    from acc_ops.world import join_world
    world = join_world(cpu=True)
    if world.rank == fail:
        raise KeyError(f"rank {fail} fails")
    total = gather(torch.tensor([world.rank])).tolist()
    precision = os.environ["ACCELERATE_MIXED_PRECISION"]
    open(os.path.join(folder, f"rank_{world.rank}"), "w").write(f"{total} {precision}")
"""


def _run(code, *args):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, args)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("call", "precision"),
    [
        (
            "notebook_launcher(work, (sys.argv[1],), num_processes=2, mixed_precision='bf16', use_port=0)",
            "bf16",
        ),
        ("debug_launcher(work, (sys.argv[1],), num_processes=2)", "no"),
        (
            "notebook_launcher(work, (sys.argv[1],), num_processes=2, use_port=0, rdzv_backend='c10d', "
            "rdzv_endpoint='127.0.0.1:0', rdzv_id='x')",
            "no",
        ),
    ],
)
def test_forked_ranks_meet(call, precision, tmp_path):
    done = _run(call, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == [f"[0, 1] {precision}"] * 2


def test_the_error_of_a_rank_is_raised_in_the_notebook(tmp_path):
    done = _run("debug_launcher(work, (sys.argv[1], 1), num_processes=2)", tmp_path)
    assert done.returncode != 0
    assert "rank 1 fails" in done.stderr


def test_one_process_is_called_in_place(tmp_path):
    code = "notebook_launcher(lambda: print(os.getpid(), os.environ['ACCELERATE_MIXED_PRECISION']), num_processes=1)\nprint(os.getpid())"
    done = _run(code)
    assert done.stdout.split()[0] == done.stdout.split()[2]
    assert done.stdout.split()[1] == "no"


def test_a_launcher_can_be_tried_with_nothing_to_do():
    done = _run(
        "from acc_trainer import test_launch\ndebug_launcher(test_launch, num_processes=2)\nprint('met')"
    )
    assert (done.returncode, done.stdout) == (0, "met\n"), done.stderr


def test_a_run_in_the_notebook_comes_before_and_after_one_on_forked_processes(tmp_path):
    code = """
from acc_trainer import Accelerator
for precision in ("no", "bf16"):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.end_training()
    debug_launcher(work, (sys.argv[1],), num_processes=2)
print("both")
"""
    done = _run(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "both\n"), done.stderr


def test_a_free_port_is_chosen_with_restarts_too(tmp_path):
    call = "notebook_launcher(work, (sys.argv[1],), num_processes=2, use_port=0, max_restarts=1)"
    done = _run(call, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == ["[0, 1] no"] * 2


@pytest.mark.parametrize(
    "launch", ["debug_launcher(stop)", "notebook_launcher(stop, (), 2, use_port=0, max_restarts=1)"]
)
def test_an_interrupted_rank_has_not_succeeded(launch):
    code = f"""
def stop():
    if os.environ["RANK"] == "1":
        raise KeyboardInterrupt
{launch}
"""
    done = _run(code)
    assert done.returncode != 0
    assert "was interrupted (KeyboardInterrupt) before its function had ended" in done.stderr
