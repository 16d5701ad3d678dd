"""Where a fake accelerator can be set up, and why not elsewhere; used by `fake_accelerator.py` only.

[Note: what was tried] `fake_driver` replaces entries of C++ tables by their place. A torch whose tables differ may end the process instead of
raising, so only what was run is taken: `TRIED` on Linux, x86-64 (2.6.0+cu124, 2.7.1+cu126, 2.8.0+cu128, 2.9.1+cu128,
2.10.0+cu128, 2.11.0+cu130, 2.12.1+cu130 and 2.13.0+cpu; with Python 3.11, 2.6 with 3.10), on a machine without a GPU. What was not run needs the variable
`TRY`. What cannot work (Windows, ROCm, an accelerator that can be used, which shares what is replaced) is refused in any case.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from packaging.version import Version

from acc_ops import devices
from acc_ops.environment import parse_flag_from_env

TRIED = tuple((2, minor) for minor in range(6, 14))  # of torch, in releases: see the note before you add one
TRY = "ACC_TRY_FAKE_ACCELERATOR"


class FakeAcceleratorUnavailable(RuntimeError):
    """A fake accelerator cannot be set up here, or was never tried here. Nothing was changed."""


class Place(NamedTuple):
    """What decides whether a fake accelerator can be set up."""

    torch: str  # its version
    builds: Mapping[str, str | None]  # 'hip' -> the version it was built for
    system: str  # sys.platform
    machine: str  # platform.machine()
    present: str  # the kind of the accelerator, or 'cpu'
    hide: str | None  # the variable that hides that accelerator


def this_place() -> Place:
    """Where this process runs. Starts no driver."""
    row = devices.device_row(devices.present_kind())
    builds = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return Place(torch.__version__, builds, sys.platform, platform.machine(), row.kind, row.visibility)


def check(place: Place | None = None) -> None:
    """Raise FakeAcceleratorUnavailable, with what to do, where a fake accelerator is not to be set up. Touches nothing."""
    place = place or this_place()
    impossible = _impossible(place)
    if impossible:
        raise FakeAcceleratorUnavailable(f"no fake accelerator here: {impossible}")
    untried = _untried(place)
    if untried and not parse_flag_from_env(TRY):
        raise FakeAcceleratorUnavailable(
            f"no fake accelerator here: it was not tried with {' and '.join(untried)}, and may end the process there; "
            f"set {TRY}=1 to try, and add what works to TRIED in acc_ops/fake_support.py"
        )


def _impossible(place: Place) -> str:
    if place.system not in ("linux", "darwin"):
        return f"torch does not show its devices on {place.system}; run this on Linux"
    if place.builds.get("hip") is not None:
        return (
            "it takes the place of 'hip', which this torch has for real; install a torch for the CPU or CUDA"
        )
    if place.present != "cpu":
        how = f" (set {place.hide} to nothing before Python starts)" if place.hide else ""
        return f"this process can use a real accelerator, {place.present}; hide it{how}"
    return ""


def _untried(place: Place) -> list[str]:
    found = []
    version = Version(place.torch)
    if version.release[:2] not in TRIED or version.is_prerelease:
        found.append(f"torch {place.torch} (but with {_listed(TRIED)})")
    if place.builds.get("xpu") is not None:
        found.append("a torch for XPU (but for CUDA and the CPU)")
    if (place.system, place.machine) != ("linux", "x86_64"):
        found.append(f"{place.system} on {place.machine} (but linux on x86_64)")
    return found


def _listed(versions: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in versions)
