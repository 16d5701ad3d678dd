"""Every kind of device in one table: a new device is a new row, and no other edit."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from acc_ops.optional import is_available

DeviceLike = int | str | torch.device


class DeviceError(ValueError):
    """What was given does not name a device, or names one this machine cannot use."""


class MemoryInfo(NamedTuple):
    """Memory of one device, in bytes."""

    free_bytes: int
    total_bytes: int


class DeviceRow(NamedTuple):
    """What is particular about one kind of device. Give the columns by name."""

    kind: str  # torch.device(...).type
    backend: str  # of torch.distributed
    distributed_type: str  # the specification's name for several of them
    rng: str  # the specification's name for their random generator
    module: str | None = None  # the attribute of `torch` with the device's functions; None: there is none
    stand_in: str | None = (
        None  # a module of ours with those functions, where torch has none, once `package` is imported
    )
    package: str | None = None  # the package that adds that attribute to torch
    since: tuple[int, int] = (2, 6)  # the first torch that can use it
    single: bool = (
        False  # there is only one, without an index in device maps; the functions about one device take none
    )
    shares_host_memory: bool = False  # its memory is the CPU's
    visibility: str | None = None  # the variable that limits which devices a process sees
    autocast_fp16: bool = True
    autocast_bf16: bool = True
    grad_scaler: bool = True  # fp16 losses can be scaled
    float64: bool = True
    fp8: bool = False  # torchao or TransformerEngine trains in 8-bit floating point on it
    no_ddp: str = ""  # why torch's DistributedDataParallel does not work on it, and what does
    memory: Callable[[Any, int], MemoryInfo] | None = None  # asks (torch module, index)


def torch_memory(module: Any, index: int) -> MemoryInfo:
    """The column `memory` of a kind whose module is like `torch.cuda`."""
    return MemoryInfo(*module.mem_get_info(index))


def _mps_memory(module: Any, index: int) -> MemoryInfo:  # noqa: ARG001 - there is only one
    total = module.recommended_max_memory()
    return MemoryInfo(total - module.driver_allocated_memory(), total)


def _host_memory(module: Any, index: int) -> MemoryInfo:  # noqa: ARG001 - there is only one
    import psutil  # noqa: PLC0415 - 8 ms that a script which never asks for memory need not wait

    memory = psutil.virtual_memory()
    return MemoryInfo(memory.available, memory.total)


_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# In the order in which they are looked for: the more special kind wins.
DEVICE_TABLE: tuple[DeviceRow, ...] = (
    DeviceRow(
        kind="mps",
        module="mps",
        backend="gloo",
        distributed_type="NO",
        rng="mps",
        single=True,
        shares_host_memory=True,
        no_ddp="torch.distributed has no backend for mps: train on one device, or on cpu",
        grad_scaler=_TORCH >= (2, 8),
        float64=False,
        memory=_mps_memory,
    ),
    DeviceRow(
        kind="mlu",
        module="mlu",
        package="torch_mlu",
        backend="cncl",
        visibility="MLU_VISIBLE_DEVICES",
        distributed_type="MULTI_MLU",
        rng="mlu",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="sdaa",
        module="sdaa",
        package="torch_sdaa",
        backend="tccl",
        visibility="SDAA_VISIBLE_DEVICES",
        distributed_type="MULTI_SDAA",
        rng="sdaa",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="musa",
        module="musa",
        package="torch_musa",
        backend="mccl",
        visibility="MUSA_VISIBLE_DEVICES",
        distributed_type="MULTI_MUSA",
        rng="musa",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="npu",
        module="npu",
        package="torch_npu",
        backend="hccl",
        visibility="ASCEND_RT_VISIBLE_DEVICES",
        distributed_type="MULTI_NPU",
        rng="npu",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="hpu",
        module="hpu",
        package="habana_frameworks.torch",
        backend="hccl",
        visibility="HABANA_VISIBLE_MODULES",
        distributed_type="MULTI_HPU",
        rng="hpu",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="cuda",
        module="cuda",
        backend="nccl",
        visibility="CUDA_VISIBLE_DEVICES",
        distributed_type="MULTI_GPU",
        fp8=True,
        rng="cuda",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="xpu",
        module="xpu",
        since=(2, 7),
        backend="xccl",
        visibility="ZE_AFFINITY_MASK",
        distributed_type="MULTI_XPU",
        rng="xpu",
        memory=torch_memory,
    ),
    DeviceRow(
        kind="neuron",
        module="neuron",
        package="torch_neuronx",
        backend="neuron",
        visibility="NEURON_RT_VISIBLE_CORES",
        distributed_type="MULTI_NEURON",
        rng="neuron",
        autocast_fp16=False,
        grad_scaler=False,
    ),
    DeviceRow(
        kind="xla",
        stand_in="acc_ops.xla",
        package="torch_xla",
        backend="xla",
        visibility="TPU_VISIBLE_CHIPS",
        distributed_type="XLA",
        rng="xla",
        no_ddp="torch_xla has its own data parallelism, whose strategy is not built yet: train on one device",
        autocast_fp16=False,
        grad_scaler=False,
        memory=torch_memory,
    ),
    DeviceRow(
        kind="cpu",
        module="cpu",
        backend="gloo",
        distributed_type="MULTI_CPU",
        fp8=True,
        rng="torch",
        memory=_host_memory,
    ),
)

NOT_DEVICES = ("meta",)  # kinds torch knows that hold no memory; `device_row` refuses them
_WITHOUT_INDEX = ("cpu", *NOT_DEVICES)


def known_kinds() -> list[str]:
    """The kinds of the table, in its order."""
    return [row.kind for row in DEVICE_TABLE]


def present_kind() -> str:
    """The kind of the accelerator of this machine, or `cpu`. Does not initialise a driver, so forking stays possible."""
    return next((row.kind for row in DEVICE_TABLE if row.kind != "cpu" and is_present(row)), "cpu")


def is_present(row: DeviceRow) -> bool:
    """Whether at least one device of this kind can be used. Does not initialise a driver."""
    if row.since > _TORCH:
        return False
    if row.module is None:  # no functions in torch: somebody has to have chosen the package
        return row.package in sys.modules
    return _has_devices(row)


def device_count(device: DeviceLike | DeviceRow) -> int:
    """How many devices of the same kind as `device` this process sees; 1 for `cpu`. Does not initialise a driver."""
    row = device if isinstance(device, DeviceRow) else device_row(device)
    module = device_module(row)
    if module is None:
        return 0
    count = getattr(module, "device_count", None)
    return int(count()) if count is not None else int(module.is_available())


def device_row(device: DeviceLike) -> DeviceRow:
    """The row of the kind `device` belongs to. Raises DeviceError when the table has no such kind."""
    if isinstance(device, str):
        kind = device.partition(":")[0]
    else:
        kind = canonical_device(device).type
    for row in DEVICE_TABLE:
        if row.kind == kind:
            return row
    raise DeviceError(f"no such kind of device: {kind!r}; known are {', '.join(known_kinds())}")


def device_module(row: DeviceRow) -> Any | None:
    """torch's module with this kind's functions (`torch.cuda`), ours where torch has none, or None where there is neither."""
    if row.module is None:
        if row.stand_in is None or not is_present(row):
            return None
        return importlib.import_module(row.stand_in)
    module = getattr(torch, row.module, None)
    if module is None and row.package is not None and is_available(row.package):
        importlib.import_module(row.package)
        module = getattr(torch, row.module, None)
    return module


def canonical_device(device: DeviceLike) -> torch.device:
    """One form for each device: an int is an index of the present kind, and only `cpu` and `meta` have no index.

    A kind without index means its current device (the first one while its driver sleeps). On a machine without an
    accelerator an int names a cuda device, as in device maps made for another machine. Raises DeviceError.
    """
    if not isinstance(device, torch.device):
        device = _named_device(device)
    indexed = device.index is not None
    if device.type in _WITHOUT_INDEX:
        return torch.device(device.type) if indexed else device
    return device if indexed else torch.device(device.type, _current_index(device.type))


def default_device(local_rank: int = 0) -> torch.device:
    """The device for the process with this local rank: its accelerator, or `cpu`.

    A process that sees a single device takes it whatever its rank. Raises DeviceError when there are too few.
    """
    kind = present_kind()
    count = device_count(kind)
    if local_rank >= count > 1:
        raise DeviceError(
            f"local rank {local_rank} has no device: this machine shows {count} {kind} devices; "
            f"start at most {count} processes on it"
        )
    return canonical_device(torch.device(kind, local_rank if local_rank < count else 0))


def set_device(device: DeviceLike) -> None:
    """Make `device` the current one of its kind, where the kind knows a current device."""
    device = canonical_device(device)
    choose = getattr(device_module(device_row(device)), "set_device", None)
    if choose is not None:
        choose(device)


def synchronize(device: DeviceLike | None = None) -> None:
    """Wait until everything given to `device` (default: the present kind's current one) is done."""
    device = canonical_device(present_kind() if device is None else device)
    if device.type in NOT_DEVICES:
        return
    row = device_row(device)
    module = device_module(row)
    if module is None or not _is_awake(module):
        return  # nothing was ever given to it
    if row.single:
        module.synchronize()
    else:
        module.synchronize(device)


def empty_cache(device: DeviceLike | None = None) -> None:
    """Give cached memory of the kind of `device` (default: the present kind) back to the system."""
    device = canonical_device(present_kind() if device is None else device)
    if device.type in NOT_DEVICES:
        return
    module = device_module(device_row(device))
    if module is not None and _is_awake(module) and hasattr(module, "empty_cache"):
        module.empty_cache()


def memory_info(device: DeviceLike) -> MemoryInfo:
    """Free and total bytes of `device`; for `cpu` what the system has available. Raises DeviceError if it cannot tell."""
    device = canonical_device(device)
    row = device_row(device)
    module = device_module(row)
    if row.memory is None or module is None:
        raise DeviceError(f"the memory of {device} is not known; give its budget in bytes yourself")
    return row.memory(module, device.index or 0)


def _named_device(device: Any) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        raise DeviceError(f"a device is an int, a str or a torch.device, got {device!r}")
    if isinstance(device, int):
        if device < 0:
            raise DeviceError(f"a device index must not be negative, got {device}")
        kind = present_kind()
        return torch.device("cuda" if kind == "cpu" else kind, device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} does not name a device: {str(error).splitlines()[0]}") from None


@functools.cache
def _has_devices(row: DeviceRow) -> bool:
    return device_count(row) > 0


def _is_awake(module: Any) -> bool:
    ask = getattr(module, "is_initialized", None)
    return True if ask is None else bool(ask())


def _current_index(kind: str) -> int:
    row = next((row for row in DEVICE_TABLE if row.kind == kind), None)
    module = None if row is None else device_module(row)
    current = getattr(module, "current_device", None)
    if current is None or not _is_awake(module):
        return 0
    return int(current())
