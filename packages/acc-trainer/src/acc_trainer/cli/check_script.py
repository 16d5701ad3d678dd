"""What `acc test` runs on every process: ranks, collectives, and training that gives the plain loop's weights."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator

_SAMPLES, _BATCH = 48, 4


def main() -> None:
    """Raise AssertionError with the rank and the numbers when something is wrong; print one line per check."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}")
    check_ranks(accelerator)
    accelerator.print("ranks: right")
    check_collectives(accelerator)
    accelerator.print("gather, broadcast, reduce: right")
    check_every_sample_once(accelerator)
    accelerator.print("every sample once: right")
    check_training(accelerator)
    accelerator.print("training equals the plain loop: right")
    accelerator.end_training()


def check_ranks(accelerator: Accelerator) -> None:
    """Every rank is there exactly once."""
    mine = torch.tensor([accelerator.process_index], device=accelerator.device)
    _expect(accelerator, accelerator.gather(mine).tolist(), list(range(accelerator.num_processes)))


def check_collectives(accelerator: Accelerator) -> None:
    """Sums and broadcasts of values that differ by rank come out the same everywhere."""
    from acc_ops.collectives import broadcast  # noqa: PLC0415  beside its only use

    size, rank = accelerator.num_processes, accelerator.process_index
    value = torch.full((3,), float(rank + 1), device=accelerator.device)
    _expect(accelerator, accelerator.reduce(value, "sum").tolist(), [size * (size + 1) / 2] * 3)
    _expect(accelerator, broadcast(value.clone(), from_process=size - 1).tolist(), [float(size)] * 3)


def check_every_sample_once(accelerator: Accelerator) -> None:
    """A length that no number of ranks divides is evaluated with every sample counted once."""
    count = _SAMPLES + 1
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=_BATCH))
    seen = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    _expect(accelerator, sorted(torch.cat(seen).tolist()), list(range(count)))


def check_training(accelerator: Accelerator) -> None:
    """Weights after one epoch equal, to rounding, those of a loop without us over the same global batches."""
    inputs = torch.linspace(-1, 1, _SAMPLES).reshape(-1, 1)  # (samples, 1)
    targets = 2 * inputs + 1
    size = accelerator.num_processes
    plain, model = _model(), _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH * size, drop_last=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    coarse = accelerator.mixed_precision not in ("no", None)
    for ours, theirs in zip(accelerator.unwrap_model(model).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.detach().cpu(), theirs.detach(), rtol=0.05 if coarse else 1e-4, atol=0.05 if coarse else 1e-5
        )


def _model() -> torch.nn.Module:
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    return model


def _expect(accelerator: Accelerator, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"rank {accelerator.process_index}: found {found}, wanted {wanted}")


if __name__ == "__main__":
    main()
