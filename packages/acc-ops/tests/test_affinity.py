"""Cores beside a GPU, on machines made of files."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_ops import affinity
from acc_ops.affinity import (
    core_text,
    node_of_pci_device,
    override_numa_affinity,
    parse_core_list,
    rank_cores,
    read_layout,
    set_numa_affinity,
    visible_device,
)

TWO_SOCKETS = {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}


def test_a_rank_gets_the_cores_of_its_gpus_node():
    everything = range(16)
    assert rank_cores(TWO_SOCKETS, 0, allowed=everything) == TWO_SOCKETS[0]
    assert rank_cores(TWO_SOCKETS, 1, allowed=everything) == TWO_SOCKETS[1]


def test_a_rank_never_gets_cores_it_may_not_use():
    assert rank_cores(TWO_SOCKETS, 1, allowed=[0, 1, 5, 12]) == [5, 12]
    assert rank_cores(TWO_SOCKETS, 1, allowed=[2, 1]) == [1, 2]


def test_an_unknown_node_leaves_the_cores_as_they_are():
    assert rank_cores(TWO_SOCKETS, -1, allowed=[3, 1]) == [1, 3]
    assert rank_cores({}, 0, allowed=[0, 1]) == [0, 1]


@given(st.sets(st.integers(0, 300)))
def test_core_lists_survive_the_way_through_text(cores):
    assert parse_core_list(core_text(cores)) == sorted(cores)


def test_linux_lists_are_read():
    assert parse_core_list("0-2,8\n") == [0, 1, 2, 8]
    assert parse_core_list("\n") == []
    assert core_text([0, 1, 2, 8]) == "0-2,8"


def test_the_layout_is_read_from_files(tmp_path):
    for node, text in (("node0", "0-1\n"), ("node1", "2-3\n"), ("node10", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    (tmp_path / "online").write_text("0-1")
    assert read_layout(tmp_path) == {0: [0, 1], 1: [2, 3], 10: []}
    assert read_layout(tmp_path / "missing") == {}


def test_the_node_of_a_gpu_is_found_by_its_address(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    assert node_of_pci_device("00000000:3B:00.0", tmp_path) == 1
    assert node_of_pci_device("00000000:3C:00.0", tmp_path) == -1


def test_a_local_index_is_translated_through_the_visible_devices():
    assert visible_device(1, None) == 1
    assert visible_device(1, "") == 1
    assert visible_device(1, "2,3") == 3
    assert visible_device(0, "GPU-1a, GPU-2b") == "GPU-1a"
    with pytest.raises(ValueError, match="local rank 2 has no GPU"):
        visible_device(2, "0,1")


class FakeProcess:
    pinned: ClassVar[list[list[int]]] = []

    def cpu_affinity(self, cores=None):
        if cores is None:
            return list(range(16))
        FakeProcess.pinned.append(cores)
        return None


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine with GPU 0 on node 0 and GPU 1 on node 1."""
    FakeProcess.pinned = []
    for index in (0, 1):
        (tmp_path / f"0000:0{index}:00.0").mkdir()
        (tmp_path / f"0000:0{index}:00.0" / "numa_node").write_text(f"{index}\n")
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode()),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(affinity, "is_cuda_available", lambda: True)
    monkeypatch.setattr(affinity, "is_rocm_available", lambda: False)
    monkeypatch.setattr(affinity, "read_layout", lambda: TWO_SOCKETS)
    monkeypatch.setattr(affinity, "node_of_pci_device", lambda address: node_of_pci_device(address, tmp_path))
    monkeypatch.setattr(affinity.psutil, "Process", FakeProcess)
    set_numa_affinity.cache_clear()
    return FakeProcess


def test_the_process_is_pinned_beside_its_gpu(two_gpus, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        override_numa_affinity(1, verbose=True)
    assert two_gpus.pinned == [TWO_SOCKETS[1]]
    assert "4-7,12-15" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    override_numa_affinity(1)
    assert two_gpus.pinned[-1] == TWO_SOCKETS[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    override_numa_affinity(0)
    assert two_gpus.pinned[-1] == TWO_SOCKETS[1]


def test_debug_mode_is_verbose(two_gpus, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    with caplog.at_level("INFO"):
        override_numa_affinity(0)
    assert "local rank 0" in caplog.text


def test_setting_twice_pins_once(two_gpus):
    set_numa_affinity(0)
    set_numa_affinity(0)
    assert len(two_gpus.pinned) == 1


def test_nvidia_needs_its_library(two_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match="pynvml"):
        override_numa_affinity(0)


def test_amd_is_asked_through_its_own_library(two_gpus, monkeypatch):
    smi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_topo_get_numa_node_number=lambda handle: {"first": 1, "second": 0}[handle],
    )
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(affinity, "is_rocm_available", lambda: True)
    override_numa_affinity(0)
    assert two_gpus.pinned == [TWO_SOCKETS[1]]
    with pytest.raises(ValueError, match="2 GPUs"):
        override_numa_affinity(2)


def test_without_cuda_nothing_happens(two_gpus, monkeypatch):
    monkeypatch.setattr(affinity, "is_cuda_available", lambda: False)
    override_numa_affinity(0)
    assert two_gpus.pinned == []
