"""Local SGD: processes train on their own for eight steps, then average their weights, which costs an eighth of the talk.

    acc launch --cpu --num_processes 2 docs/examples/local_sgd.py

Softmax regression on scikit-learn's digits. Prints the held-out accuracy and how far apart the processes' weights are at the end.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator, LocalSGD, set_seed

EPOCHS = 5


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=20, shuffle=True)
    held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=50)
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for _ in range(EPOCHS):
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    right = torch.cat(
        [
            accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == targets)
            for inputs, targets in held_out
        ]
    )
    weights = accelerator.gather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    apart = (weights - weights[0]).abs().max().item()
    accelerator.print(
        f"accuracy {right.float().mean():.4f} on {len(right)} images, weights of {len(weights)} processes apart by {apart:g}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
