"""Whether a kind of device is there and what it can do, by the specification's names; `devices.py` answers."""

from __future__ import annotations

import functools
import importlib

import torch

from acc_ops import devices
from acc_ops.environment import parse_flag_from_env
from acc_ops.optional import compare_versions, is_available, is_torch_version, is_transformer_engine_available


def get_current_device_type() -> tuple[str, str]:
    """The kind of this machine's accelerators and the specification's name for several of them; CUDA's where there are none."""
    several = (row for row in devices.DEVICE_TABLE if row.distributed_type.startswith("MULTI_"))
    row = next(
        (row for row in several if row.kind not in ("cpu", "cuda") and devices.is_present(row)),
        devices.device_row("cuda"),
    )
    return row.kind, row.distributed_type


def is_cuda_available() -> bool:
    """Whether torch sees a CUDA or ROCm device. Does not initialise the driver, so forking stays possible."""
    return _is_present("cuda")


def is_rocm_available() -> bool:
    """Whether torch is a ROCm build and sees a GPU."""
    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch is `min_version` or later and can use Apple's GPU."""
    return is_torch_version(">=", min_version) and _is_present("mps")


@functools.cache
def is_mlu_available(check_device: bool = False) -> bool:
    """Whether Cambricon devices are there; with `check_device` the driver itself is asked."""
    return _answers("mlu", check_device)


@functools.cache
def is_musa_available(check_device: bool = False) -> bool:
    """Whether Moore Threads devices are there; with `check_device` the driver itself is asked."""
    return _answers("musa", check_device)


@functools.cache
def is_npu_available(check_device: bool = False) -> bool:
    """Whether Ascend devices are there; with `check_device` the driver itself is asked."""
    return _answers("npu", check_device)


@functools.cache
def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether Tecorigin devices are there; with `check_device` the driver itself is asked."""
    return _answers("sdaa", check_device)


@functools.cache
def is_xpu_available(check_device: bool = False) -> bool:
    """Whether Intel GPUs are there; with `check_device` the driver itself is asked."""
    return _answers("xpu", check_device)


@functools.cache
def is_neuron_available(check_device: bool = False) -> bool:
    """Whether AWS Neuron cores are there; with `check_device` the driver itself is asked."""
    return _answers("neuron", check_device)


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether Gaudi devices are there; `init_hccl` also loads their collectives."""
    if not _is_present("hpu"):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Whether the devices are Gaudi of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and USE_TORCH_XLA does not forbid it; on a TPU or a GPU if asked.

    AssertionError when both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise AssertionError("check_is_tpu and check_is_gpu exclude each other: ask for one of them")
    if not (parse_flag_from_env("USE_TORCH_XLA", True) and is_available("torch_xla")):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    runtime = importlib.import_module("torch_xla.runtime")
    return str(runtime.device_type()).upper() in (("TPU",) if check_is_tpu else ("CUDA", "GPU"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the machine's device computes in bfloat16; a TPU does, unless `ignore_tpu`."""
    row = devices.device_row(devices.present_kind())
    if row.kind == "xla" and is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    supported = getattr(devices.device_module(row), "is_bf16_supported", None)
    return row.autocast_bf16 if supported is None else bool(supported())


def is_fp16_available() -> bool:
    """Whether the machine's device computes in float16: all but Gaudi 1."""
    return not is_habana_gaudi1()


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether TransformerEngine is installed and finds its MXFP8 recipe supported by this GPU."""
    if not is_transformer_engine_available() or not compare_versions("transformer_engine", ">=", "2.1.0"):
        return False
    supported, _reason = importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()
    return bool(supported)


def is_torch_distributed_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with XCCL, the collectives of Intel GPUs (2.7 or later)."""
    ask = getattr(torch.distributed, "is_xccl_available", None)
    return bool(ask()) if ask is not None else False


def _is_present(kind: str) -> bool:
    return devices.is_present(devices.device_row(kind))


def _answers(kind: str, check_device: bool) -> bool:
    row = devices.device_row(kind)
    if not devices.is_present(row):
        return False
    return not check_device or bool(getattr(devices.device_module(row), "is_available", lambda: True)())
