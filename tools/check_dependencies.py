"""Each package imports what it declares and declares what it imports: `hatch run layers`.

Every `import` statement of a package's sources is read from its syntax tree, wherever it stands. The rules:

1. what is imported outright is a declared dependency (or the package itself, or the standard library);
2. what only an extra declares may be imported under TYPE_CHECKING, otherwise it goes through `acc_ops.optional.require`;
3. what is declared outright is imported somewhere (sibling packages of acc-compat count when its table names them).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from workspace import ROOT, Package, packages

# import name -> distribution, where the two differ
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "transformer_engine": "transformer-engine",
    "megatron": "megatron-core",
    "comet_ml": "comet-ml",
    "importlib_metadata": "importlib-metadata",
}


def main(root: Path = ROOT) -> int:
    problems = [problem for package in packages(root) for problem in check(package)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(packages(root))} packages import what they declare and declare what they import")
    return 1 if problems else 0


def check(package: Package) -> Iterator[str]:
    """The problems of one package, a line each."""
    declared = {_normal(r.name) for r in package.dependencies}
    optional = {_normal(r.name) for group in package.extras.values() for r in group}
    used: set[str] = set()
    for path in sorted(package.source.rglob("*.py")):
        for module, line, typing_only in _imports(path):
            top = module.split(".")[0]
            if top == package.import_name or top in sys.stdlib_module_names:
                continue
            distribution = _normal(DISTRIBUTIONS.get(top, top))
            used.add(distribution)
            where = f"{path.relative_to(package.folder.parent.parent)}:{line}"
            if distribution in declared or (typing_only and distribution in optional):
                continue
            if distribution in optional:
                yield f"{where}: {top} is only an extra of {package.name}: look it up with acc_ops.optional.require"
            else:
                yield f"{where}: {top} is imported but {package.name} does not declare {distribution}"
    for name in sorted(declared - used):
        if not _named_in_table(package, name):
            yield f"packages/{package.name}/pyproject.toml: {name} is declared but never imported"


def _imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, only for type checkers) of every absolute import in a file."""
    tree = ast.parse(path.read_text(), filename=str(path))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in guarded
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno, id(node) in guarded


def _named_in_table(package: Package, distribution: str) -> bool:
    """acc-compat imports its siblings by name, out of a table: a text that names the module counts there."""
    if package.name != "acc-compat":
        return False
    name = re.compile(rf"\b{distribution.replace('-', '_')}\b")
    return any(
        name.search(path.read_text())
        for path in package.source.rglob("*")
        if path.suffix in {".py", ".txt", ".json"}
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
