"""What the workspace holds: the packages, in layer order, and what each declares. Used by every tool beside this file."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("acc-ops", "acc-hooks", "acc-bigmodel", "acc-plugins", "acc-trainer", "acc-compat")  # lowest first
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package folder of the workspace."""

    name: str
    folder: Path
    project: dict[str, Any]  # the [project] table of its pyproject.toml

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.import_name

    @property
    def about(self) -> Path:
        return self.source / "__about__.py"

    @property
    def version(self) -> str:
        match = VERSION.search(self.about.read_text())
        if match is None:
            raise SystemExit(f'{self.about}: no line `__version__ = "..."`')
        return match.group(1)

    @property
    def dependencies(self) -> list[Requirement]:
        return [Requirement(text) for text in self.project.get("dependencies", [])]

    @property
    def extras(self) -> dict[str, list[Requirement]]:
        table = self.project.get("optional-dependencies", {})
        return {extra: [Requirement(text) for text in texts] for extra, texts in table.items()}


def packages(root: Path = ROOT) -> list[Package]:
    """Every package below `root`/packages, lowest layer first; a folder that is not in LAYERS is an error."""
    found = {path.parent.name: path for path in sorted((root / "packages").glob("*/pyproject.toml"))}
    unknown = sorted(set(found) - set(LAYERS))
    if unknown:
        raise SystemExit(f"packages/{unknown[0]} is in no layer: add it to LAYERS in tools/workspace.py")
    return [
        Package(
            name=name, folder=found[name].parent, project=tomllib.loads(found[name].read_text())["project"]
        )
        for name in LAYERS
        if name in found
    ]


def package_named(name: str, root: Path = ROOT) -> Package:
    """The package of that name; an unknown one ends the program with the names there are."""
    for package in packages(root):
        if package.name == name:
            return package
    raise SystemExit(f"no package {name!r}; there are {', '.join(p.name for p in packages(root))}")
