"""Real processes: who goes first, what is freed, triggers, batch sizes, local SGD and compressed gradients, all in the same two."""

from __future__ import annotations

import gc
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
