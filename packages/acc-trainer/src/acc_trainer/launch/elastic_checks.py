"""What torch.distributed.run would refuse with a traceback, refused here in one line. Imports no torch."""

from __future__ import annotations

import math
import os
import re

from .errors import LaunchError
from .options import LaunchOptions

_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_TEE = re.compile(r"[0123]|(\d:[0123],)*\d:[0123]")


def check_elastic(options: LaunchOptions) -> None:
    """LaunchError for a setting of restarts, logs or rendezvous that cannot work."""
    if not (options.monitor_interval > 0 and math.isfinite(options.monitor_interval)):
        raise LaunchError(
            f"--monitor_interval must be a number of seconds above 0, got {options.monitor_interval:g}"
        )
    if not _TEE.fullmatch(options.tee):
        raise LaunchError(
            f"--tee must be 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or one of them by local rank as in 0:3,1:1; "
            f"got {options.tee!r}"
        )
    for pair in options.rdzv_conf.split(",") if options.rdzv_conf else ():
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise LaunchError(
                f"--rdzv_conf must be key=value,key=value; found {pair!r} in {options.rdzv_conf!r}"
            )
    if options.rdzv_backend not in _RENDEZVOUS and options.rdzv_backend not in _registered():
        raise LaunchError(
            f"--rdzv_backend {options.rdzv_backend} is not known; there are {', '.join(_RENDEZVOUS)}, and what installed packages "
            "register as torchrun.handlers"
        )
    if options.log_dir is not None:
        _check_folder(options.log_dir)


def _registered() -> list[str]:
    from importlib.metadata import entry_points  # noqa: PLC0415  slow, and for foreign backends alone

    return [entry.name for entry in entry_points(group="torchrun.handlers")]


def _check_folder(folder: str) -> None:
    """Whether log files can be made there is tried on the nearest folder that exists; nothing of it stays."""
    if not folder:
        raise LaunchError("--log_dir is empty: name a folder")
    nearest = os.path.abspath(folder)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    trial = os.path.join(nearest, f".acc-launch-{os.getpid()}")
    try:
        os.mkdir(trial)
        os.rmdir(trial)
    except OSError as error:
        raise LaunchError(f"--log_dir {folder} cannot be written: {error.strerror} ({nearest})") from None
