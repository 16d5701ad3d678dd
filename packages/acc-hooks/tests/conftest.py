"""What several tests need: small models, and hooks that write down what happens to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

from acc_hooks import AlignDevicesHook, ModelHook, add_hook_to_module, attach_align_device_hook
from acc_ops.fake_accelerator import FakeAcceleratorUnavailable, fake_accelerator
from acc_ops.testing import use_test_profile

use_test_profile()
settings.register_profile("wide", max_examples=3000, derandomize=False)  # of test_state_machine.py

sys.path.insert(0, str(Path(__file__).parent))  # hooks_slow_store.py, which several test files share
pytest.register_assert_rewrite("hooks_slow_store")


class Recorder(ModelHook):
    """Writes its calls to a list that several can share."""

    def __init__(self, name: str = "hook", calls: list[str] | None = None) -> None:
        self.name = name
        self.calls: list[str] = [] if calls is None else calls

    def init_hook(self, module):
        self.calls.append(f"{self.name}.init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(f"{self.name}.pre")
        return args, kwargs

    def post_forward(self, module, output):
        self.calls.append(f"{self.name}.post")
        return output

    def detach_hook(self, module):
        self.calls.append(f"{self.name}.detach")
        return module


class Raising(nn.Module):
    """A layer whose forward raises while `fails` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("forward failed")
        return self.linear(x) * self.scale + self.shift


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(ids)))


class ReadOnly(Mapping):
    """A weights map that makes a new tensor at each look, as one on disk does, and counts the looks."""

    def __init__(self, state):
        self._state = {name: value.detach().clone() for name, value in state.items()}
        self.asked: list[str] = []

    def __getitem__(self, name):
        self.asked.append(name)
        return self._state[name].clone()

    def __iter__(self):
        return iter(self._state)

    def __len__(self):
        return len(self._state)


class Writable(ReadOnly):
    def __setitem__(self, name, value):
        self._state[name] = value.detach().clone()


@pytest.fixture(scope="session")
def needs_fake_accelerator() -> None:
    """Skips the test, with the reason, where there can be no fake accelerator."""
    try:
        with fake_accelerator():
            pass
    except FakeAcceleratorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def read_only() -> type[ReadOnly]:
    return ReadOnly


@pytest.fixture
def writable() -> type[Writable]:
    return Writable


@pytest.fixture
def offload() -> Callable[..., nn.Module]:
    """Attach a hook that offloads a module which runs on the CPU."""

    def attach(module: nn.Module, **options: Any) -> nn.Module:
        return add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True, **options))

    return attach


@pytest.fixture
def net() -> Callable[[], nn.Sequential]:
    """Makes the same small model each time."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)

    return make


@pytest.fixture
def offloaded() -> Callable[..., nn.Module]:
    """Offload every module of a model that runs on the CPU."""

    def attach(model: nn.Module, **options: Any) -> nn.Module:
        attach_align_device_hook(model, execution_device="cpu", offload=True, **options)
        return model

    return attach


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def raising() -> Raising:
    torch.manual_seed(0)
    return Raising()


@pytest.fixture
def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_leftover_forward() -> Any:
    """Every test must end with this thread outside of any forward."""
    yield
    from acc_hooks import borrowing, inputs

    assert inputs._forward.copies is None
    assert not borrowing.is_converting()
