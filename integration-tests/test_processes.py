"""Real processes: who goes first, what fails where, what is freed, triggers, local SGD, compressed gradients, and runs one after the other."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.comm import CommError
from acc_ops.enums import DDPCommunicationHookType
from acc_ops.memory import find_executable_batch_size
from acc_ops.testing import run_processes
from acc_ops.world import current_world
from acc_plugins import DistributedDataParallelKwargs
from acc_trainer import Accelerator, LocalSGD, PartialState
from acc_trainer.state import AcceleratorState

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


# the same two processes for all that follows ---------------------------------------------------------------------------------


def _fresh(**options):
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)


def _others_hear_of_a_failure() -> None:
    accelerator = _fresh()
    try:
        with accelerator.main_process_first():
            assert accelerator.is_main_process  # nobody else gets in
            raise OSError("no such data")
    except OSError as error:
        said = str(error)
    except CommError as error:
        said = str(error)
    heard = "rank 0, which goes first in main_process_first, failed: OSError: no such data"
    assert said == (heard if accelerator.process_index else "no such data")
    accelerator.wait_for_everyone()  # they are in step


def _chosen_processes_and_split_inputs() -> None:
    accelerator = _fresh()
    rank = accelerator.process_index
    assert accelerator.on_last_process(lambda: rank)() == (1 if rank else None)
    assert accelerator.on_process(process_index=0)(lambda: rank)() == (None if rank else 0)
    data = {"a": [1, 2, 3], "b": torch.arange(3)}
    with accelerator.split_between_processes(data, apply_padding=True) as part:
        assert (part["a"], part["b"].tolist()) == [([1, 2], [0, 1]), ([3, 3], [2, 2])][rank]
    with PartialState().split_between_processes([]) as part:
        assert part == []
    assert data["a"] == [1, 2, 3]


def _triggers() -> None:
    accelerator = _fresh()
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def _trained(accelerator: Accelerator, steps: int = 3):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(8 * steps, 4)), 4)
    made = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), loader)
    watched = [weakref.ref(thing) for thing in (model, optimizer, loader, model.weight, *made)]
    for (x,) in made[3]:
        accelerator.backward(made[0](x).square().sum())
        made[1].step()
        made[2].step()
        made[1].zero_grad()
    return watched, made


def _nothing_is_left_of_what_was_freed() -> None:
    _trained(_fresh())  # torch's first step keeps frames in cycles
    gc.collect()
    gc.disable()
    accelerator = _fresh(gradient_accumulation_steps=2)
    watched, made = _trained(accelerator)
    assert isinstance(made[0], nn.parallel.DistributedDataParallel)
    made = accelerator.free_memory(*made)
    assert [reference() for reference in watched] == [None] * len(watched)
    strategy = weakref.ref(accelerator.strategy)
    accelerator.end_training()
    del accelerator
    gc.enable()
    assert strategy() is None


def _every_rank_finds_the_same_batch_size() -> None:
    accelerator = _fresh()
    tried = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append((batch_size, len(accelerator._models)))
        _trained(accelerator, steps=1)
        if batch_size > 8:
            raise torch.OutOfMemoryError("no room")
        return batch_size

    assert train() == 8
    assert tried == [(10, 0), (9, 0), (8, 0)]


def _local_sgd_averages_when_it_says() -> None:
    accelerator = _fresh()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        for _ in range(3):
            accelerator.backward(-model(torch.full((1, 1), 1.0 + 2 * accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            seen.append(accelerator.unwrap_model(model).weight.item())
    own = 1.0 + 2 * accelerator.process_index
    assert seen == [own, 4.0, 4.0 + own]  # averaged after the second step: (2 + 6) / 2
    assert accelerator.unwrap_model(model).weight.item() == 6.0  # and at the end: (5 + 7) / 2


def _gradient(options: DistributedDataParallelKwargs, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The averaged gradients (8, 6) of a linear layer for each of the `inputs` (1, 6), which differ between the ranks."""
    accelerator = _fresh(kwargs_handlers=[options])
    torch.manual_seed(0)
    module = nn.Linear(6, 8, bias=False)
    model = accelerator.prepare(module)
    gradients = []
    for x in inputs:
        module.weight.grad = None
        accelerator.backward((model(x) * torch.linspace(0.1, 1, 8)).square().sum())
        gradients.append(module.weight.grad.clone())
    return gradients


def _own_and_all(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each step every rank's own gradient, as a plain model has it: (rank, 8, 6)."""
    torch.manual_seed(0)
    module = nn.Linear(6, 8, bias=False)
    own = []
    for x in inputs:
        module.weight.grad = None
        (module(x) * torch.linspace(0.1, 1, 8)).square().sum().backward()
        own.append(module.weight.grad.clone())
    return [current_world().comm.all_gather(one) for one in own]


def _inputs(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(current_world().rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(steps)]


def _gradients_travel_in_16_bits() -> None:
    inputs = _inputs(2)
    for given in ("fp16", DDPCommunicationHookType.FP16):
        for got, every in zip(
            _gradient(DistributedDataParallelKwargs(comm_hook=given), inputs),
            _own_and_all(inputs),
            strict=True,
        ):
            halved = every.half() / 2  # the hook's definition: to fp16, divided by the ranks, summed there
            assert torch.equal(got, (halved[0] + halved[1]).float())
            assert not torch.equal(got, every.mean(0))
    for got, every in zip(
        _gradient(DistributedDataParallelKwargs(), inputs), _own_and_all(inputs), strict=True
    ):
        torch.testing.assert_close(got, every.mean(0))


def _power_sgd_is_its_definition() -> None:
    """After `start_powerSGD_iter` steps a gradient travels as two thin matrices; what they miss is added to the next (Vogels et al. 2019)."""
    inputs, rank, start = _inputs(6), 2, 2
    state = {"matrix_approximation_rank": rank, "start_powerSGD_iter": start, "min_compression_rate": 1}
    for wrapper in ("no", "fp16"):
        options = DistributedDataParallelKwargs(
            comm_hook="power_sgd", comm_wrapper=wrapper, comm_state_option=state
        )
        gradients = _gradient(options, inputs)
        exact = _own_and_all(inputs)
        loose = {"rtol": 2e-2, "atol": 2e-2} if wrapper == "fp16" else {}
        for step in range(start):
            torch.testing.assert_close(gradients[step], exact[step].mean(0), **loose)
        errors = torch.zeros(2, 8, 6)
        for step in range(start, 6):
            assert torch.linalg.matrix_rank(gradients[step], rtol=1e-3 if wrapper == "no" else 2e-2) <= rank
            fed = exact[step] + errors
            # P spans the columns of what is handed out, P' of the mean of what was fed in is the other thin matrix
            kept = gradients[step]
            spanned = torch.linalg.svd(kept).U[:, :rank]
            if wrapper == "no":
                torch.testing.assert_close(spanned @ (spanned.T @ fed.mean(0)), kept, rtol=1e-3, atol=1e-3)
            errors = fed - kept


def _a_hook_that_gloo_cannot_run_is_named() -> None:
    with pytest.raises(ValueError, match="comm_hook=bf16 cannot be used here"):
        _gradient(DistributedDataParallelKwargs(comm_hook="bf16"), _inputs(1))


CHECKS = [
    _others_hear_of_a_failure,
    _chosen_processes_and_split_inputs,
    _triggers,
    _nothing_is_left_of_what_was_freed,
    _every_rank_finds_the_same_batch_size,
    _local_sgd_averages_when_it_says,
    _gradients_travel_in_16_bits,
    _power_sgd_is_its_definition,
    _a_hook_that_gloo_cannot_run_is_named,
]


def _all_checks() -> list[str]:
    done = []
    for check in CHECKS:
        try:
            check()
        except BaseException as error:
            error.args = (f"{check.__name__}: {error}",)
            raise
        done.append(check.__name__)
    return done


def test_what_only_processes_can_show():
    assert run_processes(2, _all_checks) == [[check.__name__ for check in CHECKS]] * 2
