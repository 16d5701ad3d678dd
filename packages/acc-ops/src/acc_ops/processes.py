"""This process and its machine: the barrier, ports, the kernel's age."""

from __future__ import annotations

import platform
import re
import socket

from acc_ops.collectives import barrier
from acc_ops.logging import get_logger
from acc_ops.world import World

logger = get_logger(__name__)

_DEFAULT_PORT = 29500  # torchrun's


def wait_for_everyone(world: World | None = None) -> None:
    """Return when every rank has called it; MismatchError on every rank when one of them calls a collective instead."""
    barrier(world)


def get_free_port() -> int:
    """A TCP port that nothing used a moment ago. Somebody else may take it before the caller does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something on this machine listens on the TCP port (29500 unless given)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else port)) == 0


def check_os_kernel() -> None:
    """Warn once if this is a Linux older than 5.5.0, where processes can hang."""
    if platform.system() != "Linux":
        return
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is not None and (int(release[1]), int(release[2])) < (5, 5):
        logger.warning_once(
            "this Linux kernel is %s, older than the recommended 5.5.0: processes may hang",
            platform.release(),
        )
