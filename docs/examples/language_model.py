"""A language model on bytes: a small recurrent network learns to write Python from Python's own standard library.

    acc launch --cpu --num_processes 2 docs/examples/language_model.py

Prints bits per byte on held-out files, beside what knowing only how frequent each byte is would give. Lines marked `# acc` make it run anywhere.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator, set_seed

TIME = 64  # bytes the model sees at once
WINDOWS = 6000  # to learn from; as many more / 10 are held out


class ByteModel(nn.Module):
    """Logits (batch, time, 256) of the byte after each one."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(text))[0])


def standard_library() -> Tensor:
    """Windows (window, TIME + 1) of source code, in an order that a seed decides."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = text[: len(text) // (TIME + 1) * (TIME + 1)].view(-1, TIME + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[: WINDOWS + WINDOWS // 10]].long()


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Cross-entropy of every byte but the first, in nats: (batch, TIME)."""
    return nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16")  # acc
    set_seed(0)
    windows = standard_library()
    learn, held_out = TensorDataset(windows[:WINDOWS]), TensorDataset(windows[WINDOWS:])
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, batches, held_out_batches = accelerator.prepare(  # acc
        model, optimizer, DataLoader(learn, 32, shuffle=True, drop_last=True), DataLoader(held_out, 50)
    )
    for (text,) in batches:
        loss = loss_of(model, text).mean()
        accelerator.backward(loss)  # acc
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [
            accelerator.gather_for_metrics(loss_of(model, text).mean(1)) for (text,) in held_out_batches
        ]
    bits = torch.cat(losses).mean().item() / math.log(2)
    share = torch.bincount(windows[:WINDOWS].flatten(), minlength=256).float() + 1
    unigram = -(share / share.sum()).log2()[windows[WINDOWS:, 1:]].mean().item()
    accelerator.print(f"bits per byte {bits:.3f}, by frequency alone {unigram:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
