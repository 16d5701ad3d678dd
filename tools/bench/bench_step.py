"""A training step through Accelerator against the same plain PyTorch loop, in one process; the weights must end bit for bit equal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from measure import interleave, report
from torch import nn

from acc_trainer import Accelerator

ROUNDS = 15
STEPS = 60


def main() -> None:
    torch.set_num_threads(1)
    for name, micro_batches, clip in (
        ("step", 1, None),
        ("step with clipping", 1, 1.0),
        ("accumulate 4", 4, None),
    ):
        raw, raw_model = plain(micro_batches, clip)
        ours, our_model = accelerated(micro_batches, clip)
        series = interleave({"plain loop": raw, "Accelerator": ours}, ROUNDS)
        goal = {"step": 1.04, "step with clipping": 1.0, "accumulate 4": 1.0}[name]
        report(f"{name}: CPU time of {STEPS} micro-batches", series, "plain loop", {"Accelerator": goal})
        pairs = zip(raw_model.parameters(), our_model.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        print(f"  weights bit for bit equal: {'yes' if same else 'NO'}")


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return model, torch.randn(16, 32), torch.randint(8, (16,))


def plain(micro_batches: int, clip: float | None) -> tuple[Callable[[], float], nn.Module]:
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> float:
        start = time.process_time()
        for i in range(STEPS):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / micro_batches if micro_batches > 1 else loss).backward()
            if (i + 1) % micro_batches == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return time.process_time() - start

    return run, model


def accelerated(micro_batches: int, clip: float | None) -> tuple[Callable[[], float], nn.Module]:
    model, inputs, labels = model_and_data()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def run() -> float:
        start = time.process_time()
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return time.process_time() - start

    return run, model


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
