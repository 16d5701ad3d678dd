"""Numbers equal: training on real gloo processes ends with the weights of one plain torch process on the joined batches."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from acc_ops.testing import run_processes
from acc_plugins import DistributedDataParallelKwargs, GradientAccumulationPlugin
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

UPDATES = 20
BATCH = 2  # samples of one micro-batch on one process
BATCHES = 7  # micro-batches of an epoch on one process: not a multiple of a window, so the last one is short
WINDOWS, CLIPS, AVERAGED = (1, 2, 3), (None, 0.05), (False, True)

Case = tuple[int, "float | None", bool]  # window, clip, whether a short window is averaged
CASES: list[Case] = [
    case for case in itertools.product(WINDOWS, CLIPS, AVERAGED) if case[0] > 1 or not case[2]
]


def _data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    total = size * BATCH * BATCHES
    return TensorDataset(
        *(torch.randn(total, width, dtype=torch.float64, generator=generator) for width in (3, 1))
    )


def _parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A body and a head, each with an optimizer of its own."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double(), nn.Linear(5, 1).double()
    adam = torch.optim.AdamW(body.parameters(), lr=0.01)
    return body, head, adam, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)


def _weights(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def _plain(size: int, window: int, clip: float | None, averaged: bool) -> Tensor:
    """One process without us: the losses of a window are summed into one backward."""
    body, head, *optimizers = _parts()
    parameters = [*body.parameters(), *head.parameters()]
    batches = list(DataLoader(_data(size), BATCH * size))
    windows = [batches[start : start + window] for start in range(0, BATCHES, window)]
    for group in itertools.islice(itertools.cycle(windows), UPDATES):
        losses = [mse_loss(head(body(x)), y) for x, y in group]
        (torch.stack(losses).sum() / (len(group) if averaged else window)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _weights(body, head)


def _prepared(window: int, clip: float | None, averaged: bool, options: Any) -> Tensor:
    AcceleratorState._reset_state(True)
    plugin = GradientAccumulationPlugin(num_steps=window, average_short_window=averaged)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, kwargs_handlers=[options])
    body, head, *rest = accelerator.prepare(*_parts(), DataLoader(_data(accelerator.num_processes), BATCH))
    loader, optimizers = rest.pop(), rest
    assert type(body) is type(head) is DistributedDataParallel
    updates = 0
    while updates < UPDATES:
        for x, y in loader:
            with accelerator.accumulate(body, head):
                accelerator.backward(mse_loss(head(body(x)), y))
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_([*body.parameters(), *head.parameters()], clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            updates += accelerator.sync_gradients
            if updates == UPDATES:
                break
    return _weights(accelerator.unwrap_model(body), accelerator.unwrap_model(head))


def _all(cases: list[Case], options: list[Any]) -> list[Tensor]:
    """Every case in one set of processes: starting them is what costs."""
    return [_prepared(*case, one) for one in options for case in cases]


@pytest.mark.parametrize("size", [2, 3])
def test_the_weights_are_those_of_one_process_on_the_joined_batches(size: int) -> None:
    options = [
        DistributedDataParallelKwargs(),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=False, bucket_cap_mb=1),
    ]
    ranks = run_processes(size, _all, CASES, options)
    expected = [_plain(size, *case) for case in CASES] * len(options)
    assert len({tuple(weights.tolist()) for weights in expected}) == len(CASES)  # no case is another one
    for ours in ranks:
        for case, mine, plain in zip(CASES * len(options), ours, expected, strict=True):
            torch.testing.assert_close(
                mine, plain, rtol=0, atol=1e-12, msg=lambda text, case=case: f"{case}: {text}"
            )
    for others in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], others, strict=True))


def _exchanges(window: int) -> int:
    """How often gradients travel in an epoch of 6 micro-batches; one bucket, so one exchange for each backward that synchronises."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model = nn.Linear(3, 1).double()
    data = TensorDataset(*(tensor[: 6 * BATCH * accelerator.num_processes] for tensor in _data(3).tensors))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, BATCH)
    )
    calls: Counter[str] = Counter()

    def counted(state, bucket):  # without annotations: torch compares them, and here they are text
        calls["gradients"] += 1
        work = torch.distributed.all_reduce(
            bucket.buffer().div_(accelerator.num_processes), async_op=True
        ).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, counted)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
    return calls["gradients"]


def _all_exchanges(windows: list[int]) -> list[int]:
    return [_exchanges(window) for window in windows]


def test_gradients_travel_once_for_each_update() -> None:
    assert run_processes(2, _all_exchanges, [1, 2, 3, 4]) == [[6, 3, 2, 2]] * 2
