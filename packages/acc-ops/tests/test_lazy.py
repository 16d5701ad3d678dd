"""Tops of packages, and rooms, that are loaded when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acc_ops.lazy import LazyModule


def test_a_lazy_module_is_imported_when_something_of_it_is_asked_for() -> None:
    code = (
        "import sys; from acc_ops.lazy import LazyModule; room = LazyModule('colorsys'); "
        "print('colorsys' in sys.modules, room.rgb_to_hsv(0, 0, 0), 'colorsys' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "(0.0,", "0.0,", "0)", "True"]


def test_it_shows_what_the_module_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    import colorsys

    room = LazyModule("colorsys")
    assert room.rgb_to_hsv is colorsys.rgb_to_hsv
    monkeypatch.setattr(colorsys, "rgb_to_hsv", len)
    assert room.rgb_to_hsv is len
    assert repr(room) == "LazyModule('colorsys')"


def test_what_the_module_has_not_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match=r"'colorsys' has no attribute 'nothing'"):
        LazyModule("colorsys").nothing
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        LazyModule("no_such_module").anything
