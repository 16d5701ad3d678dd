"""XLA devices (TPUs and others) through torch_xla: the functions that torch has for other kinds, who this rank is, and the installation.

The functions answer to the names of `torch.cuda`'s, so that `devices.device_module` can hand this module out where torch has none. Each rank
of torch_xla has one device. Written from torch_xla's documentation; see DESIGN.md for what has been run.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from acc_ops.devices import DeviceError
from acc_ops.optional import forget_answers, installed_version, require
from acc_ops.ranks import Ranks

_WORD_BITS = 64


def device_count() -> int:
    """How many devices this rank has. Does not start the XLA runtime, so that ranks can still be started."""
    return 1


def drives_several() -> bool:
    """Whether this process has several devices, with a thread as the rank of each. Starts the XLA runtime."""
    return int(_runtime().addressable_device_count()) > 1


def current_device() -> int:
    """The index of this rank's device. Starts the XLA runtime."""
    return this_device().index or 0


def this_device() -> torch.device:
    """The device of this rank, which is of this thread where a process drives several. Starts the XLA runtime."""
    device: torch.device = _torch_xla().device()
    return device


def synchronize(device: object = None) -> None:  # noqa: ARG001 - a rank has one
    """Run what has been asked for so far, and wait for it."""
    _torch_xla().sync()
    _model().wait_device_ops()


def manual_seed_all(seed: int) -> None:
    """Seed the generator of this rank's device."""
    _model().set_rng_state(seed)


def get_rng_state() -> Tensor:
    """XLA's state is one number, here as a tensor of int64."""
    number = int(_model().get_rng_state())  # of 64 bits, without a sign
    return torch.tensor([number - 2**_WORD_BITS if number >> (_WORD_BITS - 1) else number], dtype=torch.int64)


def set_rng_state(state: Tensor) -> None:
    """Continue at a state of `get_rng_state`."""
    _model().set_rng_state(int(state) % 2**_WORD_BITS)


def mem_get_info(index: object = None) -> tuple[int, int]:  # noqa: ARG001 - a rank has one
    """Free and total bytes of this rank's device. DeviceError where XLA cannot tell, as on its CPU device."""
    try:
        info = _model().get_memory_info(this_device())
    except RuntimeError as error:
        raise DeviceError(f"XLA does not tell the memory of {this_device()}: {error}") from error
    return info["bytes_limit"] - info["bytes_used"], info["bytes_limit"]


def is_bf16_supported() -> bool:
    """Whether the device computes in bfloat16."""
    return bool(_runtime().is_bf16_supported())


def read_xla_ranks() -> Ranks:
    """Who this rank is among those that torch_xla started (`torch_xla.launch`, or one process per chip). Starts the XLA runtime."""
    runtime = _runtime()
    return Ranks(
        rank=runtime.global_ordinal(),
        size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_size=runtime.local_device_count(),
    )


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits the installed torch, inside Google Colab; `upgrade` first installs the newest torch.

    Runs pip, whose output is shown. RuntimeError elsewhere, and when pip fails. After an upgrade the notebook has to be restarted.
    """
    if "google.colab" not in sys.modules:
        raise RuntimeError(
            "install_xla() is for notebooks on Google Colab, and this is none: "
            'elsewhere run pip install "torch_xla[tpu]" for the installed version of torch'
        )
    if upgrade:
        _pip("--upgrade", "torch")
        forget_answers()
    version = (installed_version("torch") or torch.__version__).partition("+")[0]
    feature = ".".join(version.split(".")[:2])  # torch_xla 2.9.x is built for torch 2.9.x
    _pip(f"torch_xla[tpu]~={feature}.0")
    forget_answers()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not install {arguments[-1]} (exit code {done.returncode}): see its output"
        )


def _torch_xla() -> Any:
    return require("torch_xla", "an XLA device")


def _runtime() -> Any:
    return require("torch_xla.runtime", "an XLA device")


def _model() -> Any:
    return require("torch_xla.core.xla_model", "an XLA device")
