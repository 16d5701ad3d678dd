"""What this machine has, asked without torch: accelerators to run on, cores to share out."""

from __future__ import annotations

import os
from collections.abc import Mapping


def count_accelerators(environ: Mapping[str, str]) -> int:
    """The NVIDIA or AMD accelerators a process started with `environ` would see; other kinds are not counted."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            return count_ids(environ[variable])
    return _nvidia_devices() or _amd_devices()


def visibility_variable(environ: Mapping[str, str]) -> str:
    """The variable that limits which accelerators a process sees. Asks torch only when there is none of NVIDIA's or AMD's."""
    if count_accelerators(environ) or _nvidia_devices() or _amd_devices():
        return "CUDA_VISIBLE_DEVICES"
    from acc_ops.devices import device_row, present_kind  # noqa: PLC0415  loads torch, on rare machines only

    return device_row(present_kind()).visibility or "CUDA_VISIBLE_DEVICES"


def count_ids(ids: str) -> int:
    """How many devices a visibility variable names; everything from the first -1 on does not count."""
    count = 0
    for name in ids.split(","):
        if not name.strip() or name.strip() == "-1":
            break
        count += 1
    return count


def count_cores() -> int:
    """The cores this process may use, hyper-threads of one core counted once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/devices/system/cpu/smt/active", encoding="ascii") as file:
            threads_per_core = 2 if file.read().strip() == "1" else 1
    except OSError:
        threads_per_core = 1
    return max(1, cores // threads_per_core)


def _nvidia_devices() -> int:
    names = _listed("/proc/driver/nvidia/gpus")
    return min(len(names), sum(name[6:].isdigit() for name in _listed("/dev") if name.startswith("nvidia")))


def _amd_devices() -> int:
    if not os.path.exists("/dev/kfd"):
        return 0
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    return sum(_number_in(f"{nodes}/{name}/gpu_id") > 0 for name in _listed(nodes))


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _number_in(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read() or 0)
    except (OSError, ValueError):
        return 0
