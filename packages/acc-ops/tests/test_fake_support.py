"""A fake accelerator is refused, before anything is touched, where it cannot be or was never tried."""

from __future__ import annotations

from typing import Any

import pytest

from acc_ops import fake_driver, fake_support
from acc_ops.fake_accelerator import FakeAcceleratorUnavailable, fake_accelerator
from acc_ops.fake_support import TRIED, TRY, Place, check

_NEWEST = ".".join(str(part) for part in max(TRIED))
_BUILDS: dict[str, str | None] = {"cuda": "13.0", "hip": None, "xpu": None}
_GOOD = Place(f"{_NEWEST}.1+cu130", _BUILDS, "linux", "x86_64", "cpu", None)


@pytest.fixture(autouse=True)
def _not_told_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRY, raising=False)


@pytest.mark.parametrize("version", [f"{major}.{minor}.0+cpu" for major, minor in TRIED])
def test_every_torch_that_was_tried_is_taken(version: str) -> None:
    check(_GOOD._replace(torch=version))


_UNTRIED: list[dict[str, Any]] = [
    {"torch": "2.99.0"},
    {"torch": "3.6.0"},
    {"torch": f"{_NEWEST}.0a0+git123"},
    {"torch": f"{_NEWEST}.0.dev20260101"},
    {"machine": "aarch64"},
    {"system": "darwin"},
    {"builds": {**_BUILDS, "xpu": "20250000"}},
]


@pytest.mark.parametrize("change", _UNTRIED, ids=str)
def test_what_was_not_tried_needs_a_variable(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    place = _GOOD._replace(**change)
    with pytest.raises(FakeAcceleratorUnavailable, match=f"not tried with .*set {TRY}=1"):
        check(place)
    monkeypatch.setenv(TRY, "1")
    check(place)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"system": "win32"}, "Linux"),
        ({"builds": {**_BUILDS, "hip": "6.4"}}, "'hip', which this torch has for real"),
        ({"present": "cuda", "hide": "CUDA_VISIBLE_DEVICES"}, "cuda; hide it .set CUDA_VISIBLE_DEVICES"),
        ({"present": "mps"}, "real accelerator, mps"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_any_case(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRY, "1")
    with pytest.raises(FakeAcceleratorUnavailable, match=words):
        check(_GOOD._replace(**change))


def test_a_refusal_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: Any) -> None:
        raise AssertionError("torch was touched")

    monkeypatch.setattr(fake_driver, "driver", touched)
    monkeypatch.setattr(fake_support, "this_place", lambda: _GOOD._replace(torch="2.99.0"))
    with pytest.raises(FakeAcceleratorUnavailable, match=r"2\.99\.0"), fake_accelerator():
        pass


def test_this_machine_is_described() -> None:
    place = fake_support.this_place()
    assert place.torch
    assert place.present == "cpu" or place.hide or place.present == "mps"
