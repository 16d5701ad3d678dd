"""Warnings name the script's line."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from acc_ops.callers import warn_caller


def _module(name: str, source: str, **known: Any) -> Any:
    """A module of this name whose functions stand in a file that is called like it."""
    module = ModuleType(name)
    module.__dict__.update(known, warn_caller=warn_caller, contextlib=contextlib)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def _places(work: Any) -> Iterator[tuple[str, int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return ((one.filename, one.lineno) for one in caught)


def test_the_first_line_outside_our_packages_is_named_at_any_depth() -> None:
    deep = _module("acc_hooks.deep", "def down(n):\n    return down(n - 1) if n else warn_caller('deep')\n")
    middle = _module("acc_trainer.middle", "def go(n):\n    down(n)\n", down=deep.down)
    script = _module("script", "def main():\n    go(0)\n    go(7)\n", go=middle.go)
    assert list(_places(script.main)) == [("script.py", 2), ("script.py", 3)]


def test_what_decorators_put_between_does_not_count() -> None:
    ours = _module(
        "acc_trainer.around",
        "@contextlib.contextmanager\ndef around():\n    warn_caller('entered')\n    yield\ndef go():\n    with around():\n        pass\n",
    )
    script = _module("script", "def main():\n    go()\n", go=ours.go)
    assert list(_places(script.main)) == [("script.py", 2)]


def test_a_package_that_is_only_called_alike_is_outside() -> None:
    script = _module("acc_ops_of_mine", "def main():\n    warn_caller('here')\n")
    assert list(_places(script.main)) == [("acc_ops_of_mine.py", 2)]


def test_the_category_and_the_filters_of_the_caller_count() -> None:
    script = _module("script", "def main():\n    warn_caller('once', FutureWarning)\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once for each line
        script.main()
        script.main()
    assert [one.category for one in caught] == [FutureWarning]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="script")
        with pytest.raises(FutureWarning, match="once"):
            script.main()
