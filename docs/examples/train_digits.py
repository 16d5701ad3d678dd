"""Train a small convolutional classifier on real handwritten digits: the five-line change to a plain PyTorch loop.

    acc launch --cpu --num_processes 2 docs/examples/train_digits.py --project_dir out/digits

Data: scikit-learn's bundled `load_digits`, 1,797 images of 8 x 8 pixels; a fixed fifth is held out. The lines that make it run on one process
or many, on any device, are marked `# acc`. Run it again with --resume and it goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from acc_trainer import Accelerator, ProjectConfiguration, set_seed  # acc


def main() -> None:
    arguments = parse_arguments()
    project = ProjectConfiguration(arguments.project_dir, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)  # acc
    set_seed(arguments.seed)

    train_set, held_out_set = digits()
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=100)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = arguments.epochs * updates_per_epoch(len(train_set), 16, accelerator)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
    model, optimizer, scheduler, train_loader, held_out_loader = accelerator.prepare(  # acc
        model, optimizer, scheduler, train_loader, held_out_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state()  # the newest whole checkpoint
        accelerator.print(
            f"resumed at update {progress.updates}, epoch {progress.epoch}, batch {progress.batches}"
        )

    shown = None if accelerator.is_main_process else True  # one bar, where there is a terminal to draw it
    bar = tqdm(total=steps, initial=progress.updates, disable=shown, unit="update")
    for epoch in range(progress.epoch, arguments.epochs):
        model.train()
        rest = accelerator.skip_first_batches(train_loader, progress.batches)  # all of it, unless we resumed
        for images, labels in rest:  # (batch, 1, 8, 8), (batch,)
            with accelerator.accumulate(model):  # acc
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)  # acc
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batches += 1
            if accelerator.sync_gradients:
                bar.update()
                note_update(accelerator, progress, loss, arguments)
        accuracy = evaluate(accelerator, model, held_out_loader)
        progress.record_epoch(accuracy)
        if accelerator.is_main_process:
            bar.write(f"epoch {epoch}: held-out accuracy {accuracy:.4f}")
    bar.close()
    accelerator.save_model(model, arguments.project_dir / "final")
    if accelerator.is_main_process:
        (arguments.project_dir / "progress.json").write_text(json.dumps(progress.state_dict()))
    accelerator.end_training()


def note_update(
    accelerator: Accelerator, progress: Progress, loss: Tensor, arguments: argparse.Namespace
) -> None:
    """Behind an update: its loss over all processes, a line of the log and, now and then, a checkpoint."""
    progress.record_loss(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        log(arguments.project_dir, progress)
    if progress.updates % arguments.save_every == 0:
        accelerator.save_state()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """The share of the held-out images that the model gets right, every image counted once."""
    model.eval()
    right = seen = 0
    for images, labels in loader:
        guesses, answers = accelerator.gather_for_metrics((model(images).argmax(dim=-1), labels))  # acc
        right += int((guesses == answers).sum())
        seen += len(answers)
    held_out = len(digits()[1])
    if seen != held_out:
        raise RuntimeError(f"{seen} held-out samples were counted, there are {held_out}")
    return right / seen


class Progress:
    """Where the run is and what it has seen; saved and loaded with every checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0  # of this epoch, on this rank
        self.losses: list[float] = []  # one per update
        self.accuracies: list[list[float]] = []  # [update, held-out accuracy] per epoch

    @property
    def updates(self) -> int:
        return len(self.losses)

    def record_loss(self, loss: float) -> None:
        self.losses.append(loss)

    def record_epoch(self, accuracy: float) -> None:
        self.accuracies.append([self.updates, accuracy])
        self.epoch += 1
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "losses": self.losses,
            "accuracies": self.accuracies,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]
        self.losses, self.accuracies = list(state["losses"]), list(state["accuracies"])


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training set, held-out fifth): images in 0..1 of shape (1, 8, 8) and labels 0..9."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(order) // 5 + 1], order[len(order) // 5 + 1 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def classifier() -> nn.Module:
    """Two convolutions and a linear layer, with dropout so that the random state of every rank matters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(256, 10),
    )


def updates_per_epoch(samples: int, batch_size: int, accelerator: Accelerator) -> int:
    """How often the optimizer moves in one epoch: batches of every rank, accumulated by two, the last one whole or not."""
    batches = -(-samples // (batch_size * accelerator.num_processes))
    return -(-batches // accelerator.gradient_accumulation_steps)


def log(folder: Path, progress: Progress) -> None:
    """One line per update, as any training log: {"update": 12, "epoch": 0, "loss": 1.9}."""
    with (folder / "log.jsonl").open("a") as file:
        line: dict[str, Tensor | float | int] = {
            "update": progress.updates,
            "epoch": progress.epoch,
            "batch": progress.batches,
            "loss": progress.losses[-1],
        }
        file.write(json.dumps(line) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project_dir", type=Path, default=Path("out/digits"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save_every", type=int, default=20, help="updates between two checkpoints")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    arguments = parser.parse_args()
    arguments.project_dir.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
