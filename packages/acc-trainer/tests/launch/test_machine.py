"""Accelerators and cores are counted without torch."""

from __future__ import annotations

import pytest

from acc_trainer.launch import machine


@pytest.mark.parametrize(
    ("ids", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-ab12", 1), ("0,-1,2", 1), (" 3 , 4 ", 2)]
)
def test_a_visibility_variable_is_counted_as_cuda_reads_it(ids, count):
    assert machine.count_ids(ids) == count
    assert machine.count_accelerators({"CUDA_VISIBLE_DEVICES": ids}) == count


def test_devices_are_those_that_the_driver_and_the_device_folder_both_have(monkeypatch):
    folders = {
        "/proc/driver/nvidia/gpus": ["0000:01", "0000:02"],
        "/dev": ["nvidia0", "nvidia1", "nvidiactl", "null"],
    }
    monkeypatch.setattr(machine, "_listed", lambda folder: folders.get(folder, []))
    assert machine.count_accelerators({}) == 2
    folders["/dev"].remove("nvidia1")  # a container that was given one of the two
    assert machine.count_accelerators({}) == 1


def test_there_is_at_least_one_core():
    assert machine.count_cores() >= 1


def test_ids_limit_the_kind_of_device_that_is_there(monkeypatch):
    from acc_ops import devices

    assert machine.visibility_variable({"CUDA_VISIBLE_DEVICES": "0"}) == "CUDA_VISIBLE_DEVICES"
    monkeypatch.setattr(machine, "_listed", lambda folder: [])
    monkeypatch.setattr(devices, "present_kind", lambda: "npu")
    assert machine.visibility_variable({}) == "ASCEND_RT_VISIBLE_DEVICES"
    monkeypatch.setattr(devices, "present_kind", lambda: "cpu")
    assert machine.visibility_variable({}) == "CUDA_VISIBLE_DEVICES"
