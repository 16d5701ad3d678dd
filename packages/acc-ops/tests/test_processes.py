"""This process and its machine."""

from __future__ import annotations

import logging
import platform
import socket
import time

import pytest
import torch

from acc_ops import processes
from acc_ops.collectives import MismatchError, gather
from acc_ops.logging import get_logger
from acc_ops.processes import check_os_kernel, get_free_port, is_port_in_use, wait_for_everyone
from acc_ops.testing import run_threads
from acc_ops.world import current_world


def test_a_free_port_is_free_until_somebody_listens():
    port = get_free_port()
    assert not is_port_in_use(port)
    with socket.socket() as server:
        server.bind(("localhost", port))
        server.listen()
        assert is_port_in_use(port)


def test_everyone_waits_for_the_last():
    arrived = []

    def work():
        time.sleep(0.05 * current_world().rank)
        arrived.append(current_world().rank)
        wait_for_everyone()
        return len(arrived)

    assert run_threads(3, work) == [3, 3, 3]


def test_alone_nobody_waits():
    wait_for_everyone()


@pytest.mark.parametrize(
    ("system", "release", "warned"),
    [
        ("Linux", "5.4.0-200-generic", True),
        ("Linux", "4.18.0", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.8.0-1", False),
        ("Darwin", "4.0", False),
        ("Linux", "unknown", False),
    ],
)
def test_only_old_linux_kernels_are_warned_about(monkeypatch, caplog, system, release, warned):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(processes, "logger", get_logger("acc_ops.processes"))
    with caplog.at_level(logging.WARNING):
        check_os_kernel()
        check_os_kernel()
    assert len(caplog.records) == int(warned)
    assert (release in caplog.text) is warned


def test_waiting_beside_another_collective_is_an_error_on_every_rank():
    def work():
        with pytest.raises(MismatchError, match="operation: rank 0 barrier, rank 1 gather"):
            wait_for_everyone() if current_world().rank == 0 else gather(torch.ones(1))
        wait_for_everyone()

    run_threads(2, work, timeout_s=10)
