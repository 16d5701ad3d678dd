"""A small model, its checkpoint, and a format of few bits that needs no library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acc_bigmodel import init_empty_weights, offload_weight, save_weights
from acc_hooks.tensors import owner_of, put_tensor
from acc_plugins.quantization.format import WeightFormat


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 64)
        self.body = nn.Sequential(
            nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.LayerNorm(64)
        )
        self.head = nn.Linear(64, 8)
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        scale: Any = self.scale
        hidden: Tensor = self.body(self.emb(ids)) * scale
        out: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return out


class Halved(WeightFormat):
    """16 bits: the few bits of a format that every machine has. Notes its calls."""

    can_offload = True
    target_dtype = torch.float16

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)
        self.calls: list[str] = []

    def put(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        assert not statistics
        self.calls.append(name)
        put_tensor(*owner_of(model, name), nn.Parameter(_halved(value).to(device), requires_grad=False))

    def offload(
        self,
        model: nn.Module,
        name: str,
        value: Tensor,
        statistics: Mapping[str, Tensor],
        folder: str | PathLike[str],
    ) -> dict[str, Any]:
        index: dict[str, Any] = {}
        offload_weight(_halved(value), name, folder, index)
        self.put(model, name, value, statistics, torch.device("meta"))
        return index


def _halved(value: Tensor) -> Tensor:
    return value.half().float()  # as torch computes with it


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def empty() -> Callable[[], nn.Module]:
    """The same model without values; a new one at each call."""

    def built() -> nn.Module:
        with init_empty_weights():
            return Small()

    return built


@pytest.fixture
def checkpoint(plain: nn.Module, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save_weights(plain.state_dict(), folder, "model")
    return folder


@pytest.fixture
def halved() -> Callable[..., Halved]:
    return Halved
