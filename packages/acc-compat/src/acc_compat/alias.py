"""The name `accelerate` in this interpreter: its modules are the modules of `acc_compat.api`, the same objects."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from acc_compat.errors import NameTakenError
from acc_compat.finder import DoorLoader, spec_for
from acc_compat.names import API, INTERFACE

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder


class AliasLoader(DoorLoader):
    """Hands out the module of `acc_compat.api` instead of making one."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(API + spec.name[len(INTERFACE) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has just written the alias's spec into the shared module
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


class AliasFinder:
    """A meta-path finder for `accelerate` and everything below it, and for the distribution of that name."""

    def __init__(self, forced: bool, replaced: Mapping[str, ModuleType]) -> None:
        self.forced = forced
        self.replaced = replaced  # modules that were imported under the name before; put back by uninstall()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if is_alias(fullname):
            return spec_for(fullname, AliasLoader(), API + fullname[len(INTERFACE) :])
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        # in a file of its own: importlib.metadata is dear, and whoever asks has paid for it
        found: Iterable[Distribution] = importlib.import_module("acc_compat.distribution").matching(context)
        return found


def install(force: bool = False) -> None:
    """Make `accelerate` and its submodules mean `acc_compat.api` in this interpreter; a second call changes nothing.

    Raises NameTakenError when something else of that name is imported or installed, unless `force`.
    """
    if installed() is not None:
        return
    found = None if force else _taken_by()
    if found:
        raise NameTakenError(
            f"{INTERFACE} is here already ({found}), and acc-compat does not replace it unasked. Uninstall it, or force it: "
            f"acc_compat.install(force=True), python -m acc_compat --force, or ACC_COMPAT=force."
        )
    replaced = {name: module for name, module in list(sys.modules.items()) if is_alias(name)}
    for name in replaced:
        del sys.modules[name]
    sys.meta_path.insert(0, AliasFinder(force, replaced))


def uninstall() -> None:
    """Take the name back: what `install` replaced is there again, and `accelerate` is not ours any more."""
    for finder in [found for found in sys.meta_path if isinstance(found, AliasFinder)]:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if is_alias(name)]:
            del sys.modules[name]
        sys.modules.update(finder.replaced)


def installed() -> AliasFinder | None:
    """The finder that answers to the name now, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, AliasFinder)), None)


def is_alias(name: str) -> bool:
    """Whether a module name is `accelerate` or below it."""
    return name == INTERFACE or name.startswith(INTERFACE + ".")


def _taken_by() -> str | None:
    """What answers to the name already, in words; None when nothing does."""
    module = sys.modules.get(INTERFACE)
    if module is not None:
        return f"imported from {getattr(module, '__file__', None) or 'an unknown place'}"
    for finder in sys.meta_path:
        spec = finder.find_spec(INTERFACE, None)
        if spec is not None and spec.loader is not None and spec.origin is not None:  # a bare folder has none
            return f"installed at {spec.origin}"
    return None
