"""torch's functions for XLA devices, and the installation of torch_xla."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from fake_xla import FakeXla

from acc_ops import devices, xla
from acc_ops.random import capture_rng, restore_rng
from acc_ops.xla import install_xla


def test_the_device_table_finds_the_functions_when_torch_xla_is_imported(fake_xla: FakeXla) -> None:
    row = devices.device_row("xla")
    assert devices.device_module(row) is xla
    assert devices.device_count(row) == 1
    assert devices.memory_info("xla:0") == (70, 100)
    devices.synchronize("xla:0")
    assert fake_xla.calls == ["sync", "wait_device_ops"]
    devices.empty_cache("xla:0")  # there is none to empty


def test_without_torch_xla_there_are_none() -> None:
    row = devices.device_row("xla")
    assert devices.device_module(row) is None
    assert devices.device_count(row) == 0
    with pytest.raises(ImportError, match=r"an XLA device needs torch_xla.*pip install"):
        xla.this_device()


@pytest.mark.parametrize("number", [0, 7, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_state_comes_back(fake_xla: FakeXla, number: int) -> None:
    fake_xla.seeds[0] = number
    state = xla.get_rng_state()
    assert state.dtype == torch.int64
    xla.set_rng_state(torch.zeros(1, dtype=torch.int64))
    assert fake_xla.seeds[0] == 0
    xla.set_rng_state(state)
    assert fake_xla.seeds[0] == number


def test_the_state_is_captured_and_restored_with_the_others(fake_xla: FakeXla) -> None:
    fake_xla.seeds[0] = 11
    state = capture_rng()
    fake_xla.seeds[0] = 12
    assert restore_rng(state) == []
    assert fake_xla.seeds[0] == 11


class Pip:
    """Runs of pip, which fail from call number `fails` on."""

    def __init__(self, fails: int = 99) -> None:
        self.commands: list[list[str]] = []
        self.fails = fails

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, int(len(self.commands) >= self.fails))


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(xla, "installed_version", lambda name: "2.9.1+cpu")


@pytest.mark.usefixtures("colab")
def test_the_version_that_fits_torch_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip.run)
    install_xla()
    start = [sys.executable, "-m", "pip", "install"]
    assert pip.commands == [[*start, "torch_xla[tpu]~=2.9.0"]]
    install_xla(upgrade=True)
    assert pip.commands[1:] == [[*start, "--upgrade", "torch"], [*start, "torch_xla[tpu]~=2.9.0"]]


@pytest.mark.usefixtures("colab")
def test_a_pip_that_fails_is_an_error_and_nothing_more_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(fails=1)
    monkeypatch.setattr(subprocess, "run", pip.run)
    with pytest.raises(RuntimeError, match=r"pip could not install torch \(exit code 1\)"):
        install_xla(upgrade=True)
    assert len(pip.commands) == 1


def test_elsewhere_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip.run)
    with pytest.raises(RuntimeError, match=r"Google Colab, and this is none.*pip install"):
        install_xla()
    assert pip.commands == []
