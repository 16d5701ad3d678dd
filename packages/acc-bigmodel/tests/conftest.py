"""What the tests of acc-bigmodel share: small models, checkpoints of them, and a look at this process's own memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from acc_bigmodel import init_empty_weights, save_weights
from acc_ops.fake_accelerator import FakeAccelerator, FakeAcceleratorUnavailable, fake_accelerator
from acc_ops.testing import use_test_profile

use_test_profile()


class TiedModel(nn.Module):
    """An embedding, three layers of a block, a head that shares the embedding's weight, and both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)  # (batch, 8)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden) * self.scale)  # (batch, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden)))


@pytest.fixture
def tied_model() -> nn.Module:
    return build()


@pytest.fixture
def empty_model() -> nn.Module:
    with init_empty_weights():
        return build()


@pytest.fixture
def new_model() -> Callable[[], nn.Module]:
    """Another model with other weights."""
    return build


@pytest.fixture
def checkpoint(tied_model: nn.Module, tmp_path: Path) -> Path:
    """A folder with the weights of `tied_model` in one safetensors file."""
    folder = tmp_path / "checkpoint"
    save_weights(tied_model.state_dict(), folder, "model")
    return folder


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.tensor([0, 3, 11, 5])


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    """A device that is not the CPU, two of them."""
    with contextlib.ExitStack() as stack:
        try:
            accelerator = stack.enter_context(fake_accelerator())
        except FakeAcceleratorUnavailable as error:
            pytest.skip(str(error))
        yield accelerator


@pytest.fixture
def anonymous_bytes() -> Callable[[], int]:
    """This process's memory that no file stands behind."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def read() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    return read


def build() -> nn.Module:
    model = TiedModel()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.copy_(torch.rand_like(tensor) + 0.1)
    return model.eval()
