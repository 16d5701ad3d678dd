"""Early stopping with a trigger: whichever process sees that it is time says so, and all of them stop at the same step.

    acc launch --cpu --num_processes 2 docs/examples/early_stopping.py

Linear regression on made data. Here the last process alone watches the held-out loss; `set_trigger` is local, `check_trigger` is asked by all.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator, set_seed

PATIENCE = 3  # epochs without a better held-out loss
LIMIT = 200  # epochs at most
NOISE = 0.5


class Watch:
    """Says when the loss has not got better for some time."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0

    def is_over(self, loss: float) -> bool:
        better = loss < self.best - 1e-4
        self.best, self.waited = (loss, 0) if better else (self.best, self.waited + 1)
        return self.waited >= PATIENCE


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    truth = torch.randn(20, 1)
    x = torch.randn(1100, 20)
    y = x @ truth + NOISE * torch.randn(1100, 1)
    held_out_x, held_out_y = x[1000:].to(accelerator.device), y[1000:].to(accelerator.device)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=25, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    watch = Watch()
    epochs = 0
    while epochs < LIMIT:
        for inputs, targets in batches:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        epochs += 1
        if accelerator.is_last_process:
            with torch.no_grad():
                loss = nn.functional.mse_loss(accelerator.unwrap_model(model)(held_out_x), held_out_y)
            if watch.is_over(loss.item()):
                accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    stopped = accelerator.gather(torch.tensor([epochs], device=accelerator.device)).tolist()
    with torch.no_grad():
        loss = nn.functional.mse_loss(accelerator.unwrap_model(model)(held_out_x), held_out_y).item()
    accelerator.print(f"stopped after epoch {stopped}, held-out loss {loss:.3f}, noise {NOISE**2:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
