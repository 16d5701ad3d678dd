"""Tops of packages, and rooms, that are loaded when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from acc_ops.lazy import LazyLogger, LazyModule


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


def test_a_lazy_logger_loads_logging_when_it_speaks_and_names_who_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = (
        "import sys; from acc_ops.lazy import LazyLogger; logger = LazyLogger('a.b'); "
        "print('logging' in sys.modules); logger.warning('x'); print('logging' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
                         capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert out.split() == ["False", "True"]
    LazyLogger("a.b").warning("%d of them", 3)
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.filename) == ("a.b", "3 of them", "test_lazy.py")
    assert repr(LazyLogger("a.b")) == "LazyLogger('a.b')"
