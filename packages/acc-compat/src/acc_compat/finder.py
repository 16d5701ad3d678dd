"""Finds the modules of the interface below `acc_compat.api`, from the table of names alone.

Every module is a package, so that importing a name which is not built reaches `find_spec` and is answered in our
words. `python -m acc_compat.api.commands.launch` works because a module with a built `main` also has a `__main__`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from acc_compat import names
from acc_compat.door import Door
from acc_compat.errors import NotBuiltImportError, not_built
from acc_compat.names import API, INTERFACE_VERSION

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc costs 20 ms at every start with ACC_COMPAT set; the import system asks for methods only

ORIGIN = "the table of names of acc_compat"


class DoorLoader(Loader):
    """Makes the module; there is nothing to run in it."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Door(spec.name, f"The interface of {spec.name}, as acc builds it.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__file__"] = (
            names.__file__
        )  # libraries look beside it; it is what the module is made from
        if module.__name__ == API:
            vars(module)["__version__"] = INTERFACE_VERSION


class MainLoader(Loader):
    """Gives `runpy` the code that calls a module's `main`."""

    def get_code(self, fullname: str) -> CodeType:
        module = fullname.rpartition(".")[0]
        return compile(
            f"from {module} import main\nraise SystemExit(main())\n",
            f"<main of {module}>",
            "exec",
            dont_inherit=True,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:  # noqa: ARG002  the protocol's
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), vars(module))


class ApiFinder:
    """A meta-path finder for `acc_compat.api` and everything below it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == API or fullname.startswith(API + "."):
            return spec_for(fullname, DoorLoader())
        return None


def register() -> None:
    """Put an ApiFinder on the meta path, once."""
    if not any(isinstance(finder, ApiFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ApiFinder())


def spec_for(
    fullname: str, loader: DoorLoader, real: str | None = None
) -> importlib.machinery.ModuleSpec | None:
    """The spec of the module `fullname`, known to the table as `real`; None when the interface has no such module.

    Raises NotBuiltImportError when it is a name of the interface that is not built yet.
    """
    real = real or fullname
    if real in names.modules():
        return importlib.machinery.ModuleSpec(fullname, loader, origin=ORIGIN, is_package=True)
    parent, _, leaf = real.rpartition(".")
    home = names.exports(parent).get("main" if leaf == "__main__" else leaf)
    if home is None:
        return None
    if home.module is None:
        raise NotBuiltImportError(not_built(home), name=fullname)
    if leaf != "__main__":
        return None
    where = importlib.util.find_spec(home.module)
    return importlib.machinery.ModuleSpec(fullname, MainLoader(), origin=where.origin if where else ORIGIN)
