"""Package top levels that cost nothing: a table of names, loaded one by one when they are first asked for.

Used by the `__init__.py` of every acc package (PEP 562). Types come from the `__init__.pyi` beside it; a test of each
package compares the two with `acc_ops.testing.stub_names`.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost every `acc --help` 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for `package`, whose public `names` map to the submodule that defines each.

    A home that begins with `acc_` is the whole name of a module of another package, whose name is offered here too.

    >>> __getattr__, __dir__, __all__ = lazy_exports(__name__, {"gather": "collectives"})
    """
    public = sorted(names)

    def load(name: str) -> Any:
        home = names.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = home if home.startswith("acc_") else f"{package}.{home}"
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, listing, public


class LazyModule:
    """Stands for a module, which is imported when something of it is first asked for: a facade then costs what is used of it.

    >>> metrics = LazyModule("acc_trainer.metrics")
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"LazyModule({self._name!r})"


class LazyLogger:
    """Stands for `logging.getLogger(name)`, so that who has nothing to say does not load logging (4 ms of the command line's start)."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module("logging").getLogger(self._name), attribute)

    def __repr__(self) -> str:
        return f"LazyLogger({self._name!r})"
