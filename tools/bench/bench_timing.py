"""What a step timer costs: the same training steps with `time_steps` and without, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from measure import interleave, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator

ROUNDS = 31
SIZES = {"small steps": (64, 16, 120), "usual steps": (512, 64, 30)}  # width, batch size, steps


def main() -> None:
    torch.set_num_threads(1)
    for name, (width, batch, steps) in SIZES.items():
        plain, timed = (contender(width, batch, steps, timer) for timer in (False, True))
        series = interleave({"no timer": plain, "time_steps": timed}, ROUNDS, warmup=3)
        goals = {"time_steps": 1.01} if name == "usual steps" else {}
        report(f"{name}: CPU time of {steps} steps", series, "no timer", goals)
        extra = series["time_steps"].median - series["no timer"].median
        print(f"  the timer costs {extra / steps * 1e6:.1f} us a step")


def contender(width: int, batch: int, steps: int, timer: bool) -> Callable[[], float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    )
    samples = TensorDataset(torch.randn(batch * steps, width), torch.randint(8, (batch * steps,)))
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(samples, batch))

    def run() -> float:
        start = time.process_time()
        with accelerator.time_steps() if timer else nullcontext():
            for inputs, labels in data:
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        return time.process_time() - start

    return run


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
