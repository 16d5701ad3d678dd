"""Pin a process to the cores beside its GPU.

[Note: NUMA] a machine with several sockets has one NUMA node per socket (or more): cores, memory and GPUs that reach each other directly. A rank
whose cores sit on another node than its GPU pays for every copy. The layout is read from Linux's /sys, the GPU's node from its PCI
address (pynvml tells that) or from amdsmi.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from acc_ops.device_checks import is_cuda_available, is_rocm_available
from acc_ops.environment import parse_choice_from_env, parse_flag_from_env
from acc_ops.optional import require

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """`override_numa_affinity`, once: a second identical call does nothing, so cores pinned by somebody else since then stay."""
    override_numa_affinity(local_process_index, verbose=verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run only on the cores of the NUMA node of GPU `local_process_index`. Nothing to do without CUDA or ROCm.

    `verbose` (None: the variable ACCELERATE_DEBUG_MODE) logs the cores. ImportError without pynvml (NVIDIA) or amdsmi (AMD).
    """
    if not is_cuda_available():
        return
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    node = (_rocm_node if is_rocm_available() else _nvidia_node)(local_process_index)
    process = psutil.Process()
    cores = rank_cores(read_layout(), node, allowed=process.cpu_affinity() or ())
    process.cpu_affinity(cores)
    if verbose:
        logger.info(
            "local rank %d runs on cores %s (NUMA node %d)", local_process_index, core_text(cores), node
        )


def rank_cores(layout: Mapping[int, Collection[int]], node: int, *, allowed: Collection[int]) -> list[int]:
    """The cores a rank should run on: those of its GPU's `node` that the process is `allowed` to use, in order.

    All allowed ones when the node is unknown (-1, as on a machine with one node) or has none of them (a container on other cores).
    """
    near = sorted(set(layout.get(node, ())) & set(allowed))
    return near or sorted(allowed)


def read_layout(root: Path = _NODES) -> dict[int, list[int]]:
    """The cores of each NUMA node of this machine; empty where Linux does not tell."""
    return {
        int(folder.name.removeprefix("node")): parse_core_list((folder / "cpulist").read_text())
        for folder in sorted(root.glob("node[0-9]*"))
    }


def parse_core_list(text: str) -> list[int]:
    """The numbers in Linux's list format: `0-2,8` is [0, 1, 2, 8]."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return cores


def core_text(cores: Collection[int]) -> str:
    """The inverse of `parse_core_list`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def visible_device(index: int, visible: str | None) -> int | str:
    """Which GPU of the machine a process calls `index` (a number, or a text such as `GPU-1a2b`), where the variable of visible devices says `visible`.

    ValueError when so many are not visible.
    """
    if not visible or not visible.strip():
        return index
    names = [name.strip() for name in visible.split(",")]
    if not 0 <= index < len(names):
        raise ValueError(f"local rank {index} has no GPU: only {visible!r} are visible")
    return int(names[index]) if names[index].isdigit() else names[index]


def node_of_pci_device(address: str, root: Path = _PCI) -> int:
    """The NUMA node of a PCI address as NVML writes it (`00000000:3B:00.0`); -1 where Linux does not tell."""
    domain, _, rest = address.lower().partition(":")
    file = root / f"{domain[-4:]}:{rest}" / "numa_node"
    return int(file.read_text()) if file.is_file() else -1


def _nvidia_node(local_process_index: int) -> int:
    nvml: Any = require("pynvml", "pinning a process to the cores beside its GPU")
    name = visible_device(local_process_index, parse_choice_from_env("CUDA_VISIBLE_DEVICES", ""))
    nvml.nvmlInit()
    try:
        if isinstance(name, int):
            handle = nvml.nvmlDeviceGetHandleByIndex(name)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        address = nvml.nvmlDeviceGetPciInfo(handle).busId
    finally:
        nvml.nvmlShutdown()
    return node_of_pci_device(address.decode() if isinstance(address, bytes) else address)


def _rocm_node(local_process_index: int) -> int:
    smi: Any = require("amdsmi", "pinning a process to the cores beside its GPU")
    visible = parse_choice_from_env("HIP_VISIBLE_DEVICES", parse_choice_from_env("ROCR_VISIBLE_DEVICES", ""))
    name = visible_device(local_process_index, visible)
    smi.amdsmi_init()
    try:
        handles = smi.amdsmi_get_processor_handles()
        if not isinstance(name, int) or name >= len(handles):
            raise ValueError(f"amdsmi shows {len(handles)} GPUs and none called {name!r}")
        return int(smi.amdsmi_topo_get_numa_node_number(handles[name]))
    finally:
        smi.amdsmi_shut_down()
