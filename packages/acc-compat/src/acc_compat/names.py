"""The table of names: which modules the interface has, what each shows, and where that lives with us.

The data is `names.txt`, one line for a name. It is read once, when a module of the interface is first asked for.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

INTERFACE = "accelerate"
INTERFACE_VERSION = "1.15.0"
API = "acc_compat.api"
NOT_BUILT = "-"


class Home(NamedTuple):
    """Where a name of the interface is defined: there (`owner`), and here (`module`, `attribute`; None: not built)."""

    owner: str  # dotted name below acc_compat.api of the module that defines it
    name: str  # its name in the owner
    module: str | None  # the module of ours that defines it
    attribute: str  # its name in that module

    @property
    def public(self) -> str:
        """The name as the interface's users know it: `accelerate.utils.operations.gather`."""
        return f"{INTERFACE}{self.owner[len(API) :]}.{self.name}"


Exports = Mapping[str, Home]


@functools.cache
def modules() -> Mapping[str, Exports]:
    """Every module of the interface (`acc_compat.api.utils`) and what it shows, by name."""
    data = pkgutil.get_data(__package__, "names.txt")
    if data is None:  # a loader that cannot read data files
        raise FileNotFoundError("acc_compat/names.txt, the table of names, is missing: reinstall acc-compat")
    return parse(data.decode())


def exports(module: str) -> Exports:
    """What one module of the interface shows; empty for a module that it does not have."""
    return modules().get(module, {})


def submodules(module: str) -> list[str]:
    """The last parts of the names of the modules directly below `module`."""
    return [name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == module]


def packages() -> frozenset[str]:
    """Our packages that define at least one name."""
    return frozenset(
        home.module.partition(".")[0]
        for shown in modules().values()
        for home in shown.values()
        if home.module
    )


def parse(text: str) -> Mapping[str, Exports]:
    """The table in `text`; raises ValueError with the line that is not understood."""
    found: dict[str, dict[str, Home]] = {}
    borrowed: list[tuple[str, str, str, str]] = []  # (module, shown name, owner, name there)
    module = ""
    for number, line in _logical_lines(text):
        if line.startswith("[") and line.endswith("]"):
            module = _dotted(line[1:-1])
            found[module] = {}
        elif line.startswith("from ") and ":" in line:
            owner, _, names = line[5:].partition(":")
            for part in names.split(","):
                words = part.split()
                borrowed.append((module, words[-1], _dotted(owner.strip()), words[0]))
        elif module and len(line.split()) == 2:
            name, home = line.split()
            place, _, attribute = home.partition(":")
            built = None if place == NOT_BUILT else place
            found[module][name] = Home(module, name, built, attribute or name)
        else:
            raise ValueError(
                f"names.txt line {number} is not `name home`, `[module]` or `from module: names`: {line!r}"
            )
    for module, shown, owner, name in borrowed:
        if name not in found.get(owner, {}):
            raise ValueError(f"names.txt: {module} shows {shown} from {owner}, which does not define {name}")
        found[module][shown] = found[owner][name]
    return MappingProxyType(found)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each joined with the indented ones that follow; numbered from 1."""
    number, whole = 0, ""
    for at, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        if line[:1].isspace():
            whole += " " + line.strip()
            continue
        if whole:
            yield number, whole
        number, whole = at, line
    if whole:
        yield number, whole


def _dotted(module: str) -> str:
    return API if module == "." else f"{API}.{module}"
