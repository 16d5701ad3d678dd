"""What nvidia-smi says about this machine, asked without touching the driver from this process."""

from __future__ import annotations

import functools
import shutil
import subprocess

from packaging.version import Version


def get_gpu_info() -> tuple[list[str], int]:
    """The names of the machine's NVIDIA GPUs and their number; FileNotFoundError without nvidia-smi."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the NVIDIA driver, such as `550.54.15`; FileNotFoundError without nvidia-smi."""
    return _query("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """False only for several GPUs, one of them an RTX 40xx, with a driver older than 550.40.07: these cannot talk to each other directly.

    True when the machine cannot be asked.
    """
    try:
        names, count = get_gpu_info()
        if count < 2 or not any("RTX 40" in name for name in names):
            return True
        return Version(get_driver_version()) >= Version("550.40.07")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return True


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Whether the GPUs compute in 8-bit floating point (compute capability 8.9 or more); what torch raises where there is no CUDA."""
    try:
        capabilities = [tuple(int(part) for part in text.split(".")) for text in _query("compute_cap")]
    except (OSError, subprocess.SubprocessError, ValueError):
        capabilities = []
    if not capabilities:
        import torch  # noqa: PLC0415  only where nvidia-smi has no answer

        capabilities = [torch.get_device_module("cuda").get_device_capability()]
    return min(capabilities) >= (8, 9)


def _query(what: str) -> list[str]:
    """One line per GPU."""
    answer = subprocess.run(
        [_nvidia_smi(), f"--query-gpu={what}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _nvidia_smi() -> str:
    found = shutil.which("nvidia-smi")
    if found is not None:
        return found
    raise FileNotFoundError("nvidia-smi is not on the path: is an NVIDIA driver installed?")
