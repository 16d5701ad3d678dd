"""Devices by the specification's names."""

from __future__ import annotations

import inspect

import pytest
import torch

from acc_ops import device_checks, devices


def test_every_check_answers_with_a_boolean():
    checks = [
        name
        for name, check in vars(device_checks).items()
        if name.startswith("is_") and getattr(check, "__module__", "") == "acc_ops.device_checks"
    ]
    assert len(checks) > 15
    for name in checks:
        assert getattr(device_checks, name)() in (True, False), name


def test_the_checks_agree_with_the_device_table():
    for kind in ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron"):
        present = devices.is_present(devices.device_row(kind))
        assert getattr(device_checks, f"is_{kind}_available")() is present


def test_the_signatures_are_the_specifications():
    for kind in ("xpu", "npu", "mlu", "musa", "sdaa", "neuron"):
        signature = inspect.signature(getattr(device_checks, f"is_{kind}_available"))
        assert [(p.name, p.default) for p in signature.parameters.values()] == [("check_device", False)]


def test_a_tpu_and_a_gpu_exclude_each_other():
    with pytest.raises(AssertionError, match="exclude"):
        device_checks.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_bf16_is_the_devices_own_answer(monkeypatch):
    class Module:
        @staticmethod
        def is_bf16_supported():
            return False

    assert device_checks.is_bf16_available() in (True, False)
    monkeypatch.setattr(devices, "device_module", lambda row: Module)
    assert device_checks.is_bf16_available() is False


def test_a_tpu_has_bf16_unless_ignored(monkeypatch):
    monkeypatch.setattr(devices, "present_kind", lambda: "xla")
    monkeypatch.setattr(
        device_checks, "is_torch_xla_available", lambda check_is_tpu=False, check_is_gpu=False: check_is_tpu
    )
    assert device_checks.is_bf16_available() is True
    assert device_checks.is_bf16_available(ignore_tpu=True) is False


def test_only_the_first_gaudi_lacks_fp16(monkeypatch):
    monkeypatch.setattr(device_checks, "is_habana_gaudi1", lambda: True)
    assert device_checks.is_fp16_available() is False
    monkeypatch.setattr(device_checks, "is_habana_gaudi1", lambda: False)
    assert device_checks.is_fp16_available() is True


def test_the_device_type_is_cudas_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(devices, "is_present", lambda row: False)
    assert device_checks.get_current_device_type() == ("cuda", "MULTI_GPU")
    monkeypatch.setattr(devices, "is_present", lambda row: row.kind in ("mps", "cuda", "cpu"))
    assert device_checks.get_current_device_type() == ("cuda", "MULTI_GPU")


def test_the_device_type_is_looked_for_in_the_specifications_order(monkeypatch):
    order = ["mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"]
    for first, kind in enumerate(order):
        monkeypatch.setattr(devices, "is_present", lambda row, here=order[first:]: row.kind in here)
        assert device_checks.get_current_device_type() == (kind, f"MULTI_{kind.upper()}")


def test_asking_does_not_wake_the_driver():
    device_checks.is_cuda_available()
    device_checks.is_xpu_available()
    assert not torch.cuda.is_initialized()
