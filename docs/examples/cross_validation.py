"""Cross-validation: several runs one after the other in one process, each from a fresh start.

    python docs/examples/cross_validation.py

Five folds of scikit-learn's digits; every image is held out once. At the end the first fold is trained twice more, with the same result
and in bf16: a run takes nothing over from those before it, neither objects nor numbers nor the precision.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator, PartialState, set_seed

FOLDS = 5


def run(images: Tensor, labels: Tensor, held_out: Tensor, mixed_precision: str = "no") -> tuple[int, int]:
    """How many of the images marked in `held_out` a model gets right that was trained on the others, and how many there are."""
    accelerator = Accelerator(mixed_precision=mixed_precision)
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learn = DataLoader(TensorDataset(images[~held_out], labels[~held_out]), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=100)
    model, optimizer, learn, test = accelerator.prepare(model, optimizer, learn, test)
    for _ in range(6):
        for inputs, targets in learn:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    right = torch.cat(
        [accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == targets) for inputs, targets in test]
    )
    model, optimizer, learn, test = accelerator.free_memory(model, optimizer, learn, test)
    accelerator.end_training()  # the next run starts anew
    return int(right.sum()), len(right)


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    fold = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    counts = [run(images, labels, fold == number) for number in range(FOLDS)]
    right, seen = sum(right for right, _ in counts), sum(seen for _, seen in counts)
    again, in_bf16 = (run(images, labels, fold == 0, precision)[0] for precision in ("no", "bf16"))
    say = PartialState().print  # once, on any number of processes
    say(f"accuracy {right / seen:.4f} over {seen} images, right by fold: {[right for right, _ in counts]}")
    say(f"the first fold again: {again}, and in bf16: {in_bf16}")


if __name__ == "__main__":
    main()
