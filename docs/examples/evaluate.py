"""Metric evaluation: one figure, whatever the number of processes, though the samples do not divide by it.

    acc launch --cpu --num_processes 2 docs/examples/evaluate.py

A nearest-mean classifier of scikit-learn's digits is evaluated by all processes. `gather_for_metrics` leaves out what was repeated to make
the last batches as long as each other, for tensors as well as for text, so that the figures are those of a single process.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acc_trainer import Accelerator


class NearestMean(nn.Module):
    """Minus the distance (batch, 10) to the mean image of each digit."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", torch.stack([images[labels == digit].mean(0) for digit in range(10)]))

    def forward(self, images: Tensor) -> Tensor:
        return -torch.cdist(images, self.means)


def main() -> None:
    accelerator = Accelerator()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    learn, held_out = slice(0, 1000), range(1000, 1797)  # 797 samples, a prime number
    samples = [(images[i], labels[i], f"digit {i}") for i in held_out]  # each with a name, which is text
    model, batches = accelerator.prepare(
        NearestMean(images[learn], labels[learn]), DataLoader(samples, batch_size=32)
    )
    table = torch.zeros(10, 10, dtype=torch.long)  # (true digit, guessed digit)
    wrong: list[str] = []
    for batch, answers, names in batches:
        guesses = model(batch).argmax(dim=1)
        missed = [name for name, miss in zip(names, guesses != answers, strict=True) if miss]
        wrong += accelerator.gather_for_metrics(missed, use_gather_object=True)
        guesses, answers = accelerator.gather_for_metrics((guesses, answers))
        table += torch.bincount(answers.cpu() * 10 + guesses.cpu(), minlength=100).view(10, 10)
    right = table.diagonal()
    f1 = (2 * right / (table.sum(0) + table.sum(1))).mean().item()
    accelerator.print(
        f"{table.sum()} samples, accuracy {right.sum() / table.sum():.6f}, macro F1 {f1:.6f}, "
        f"{len(set(wrong))} wrong, the first of them {min(wrong)}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
