"""The model, the batches and the plain torch that the strategy contract compares with; all in float64 unless said."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

FEATURES = 16  # what fp8 needs, and what meshes of 2, 4, 8 and 16 ranks can split
SAMPLES = 48  # of one global batch: 1, 2, 3, 4, 6, 8, 12 or 24 shares of two micro-batches


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 4), as is the output."""
        out: Tensor = self.second(self.first(x))
        return out


def sample_model(seed: int = 0) -> nn.Sequential:
    """Three linear layers, "0", "2" and "4"; the first two are a pair that a mesh can split by columns, then by rows."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES),
        nn.Tanh(),
        nn.Linear(FEATURES, FEATURES),
        nn.Tanh(),
        nn.Linear(FEATURES, 1),
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / FEATURES**0.5)
    return model


def sample_batch() -> tuple[Tensor, Tensor]:
    """The global batch: inputs (SAMPLES, FEATURES) and targets (SAMPLES, 1)."""
    generator = torch.Generator().manual_seed(100)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.square().mean(1, keepdim=True)


class Reference:
    """Plain torch in this process, on the whole batch: what every strategy must equal."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], *, adam: bool = False) -> None:
        self.model, self.batch = model, batch
        self.optimizer = sample_optimizer(model, adam=adam)

    def backward(self) -> Tensor:
        """Make the gradients of the whole batch; the loss."""
        self.optimizer.zero_grad()
        x, y = self.batch
        loss = mse_loss(self.model(x), y)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """By name, of the parameters that have one."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def norm(self) -> Tensor:
        """The norm of all gradients together."""
        return torch.stack([gradient.norm() for gradient in self.gradients().values()]).norm()

    def step(self) -> float:
        """One whole step; its loss."""
        loss = self.backward()
        self.optimizer.step()
        return loss.item()


def sample_optimizer(model: nn.Module, *, adam: bool = False) -> Any:
    """Adam, whose state a checkpoint must keep, or plain SGD."""
    return (
        torch.optim.Adam(model.parameters(), lr=0.01) if adam else torch.optim.SGD(model.parameters(), lr=0.1)
    )


def copied(state: Any) -> dict[str, Tensor]:
    """Values that later steps do not change."""
    return {name: value.detach().clone() for name, value in state.items()}


def doubles(values: Any) -> Tensor:
    """Numbers as a tensor of float64."""
    return torch.tensor(values, dtype=torch.float64)
