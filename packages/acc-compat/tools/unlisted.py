"""Lists the lines of the table that are behind the code: names called not built although a module of ours defines them,
and names whose home does not define them any more.

python packages/acc-compat/tools/unlisted.py [--write]

With --write the table gets the homes that are certain: exactly one module of ours defines the name.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ROOT / "acc-compat" / "src" / "acc_compat" / "names.txt"
NOT_BY_NAME = {  # what is called so with us is, or may be, something else
    *("main", "logger", "version", "initialize", "prepare_data_loader", "load_config", "DYNAMO_BACKENDS"),
}


def definitions(root: Path) -> dict[str, list[str]]:
    """name -> modules of ours that define it at top level."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.glob("acc-*/src/acc_*/**/*.py")):
        source = path.relative_to(next(p for p in path.parents if p.name == "src"))
        module = ".".join(source.with_suffix("").parts).removesuffix(".__init__")
        if module.startswith("acc_compat"):
            continue
        for node in ast.parse(path.read_text()).body:
            for name in defined_by(node):
                if module not in found.setdefault(name, []):  # overloads
                    found[name].append(module)
    return found


def defined_by(node: ast.stmt) -> list[str]:
    """The names that one statement at top level defines; an import defines none."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def main(write: bool) -> None:
    """Print what is behind, and write it into the table when asked to."""
    found = definitions(ROOT)
    lines = NAMES.read_text().splitlines()
    section = ""
    for at, line in enumerate(lines):
        section = line if line.startswith("[") else section
        match = re.fullmatch(r"(\w+)( +)(-|[\w.]+)", line)
        if match is None or match[1] in NOT_BY_NAME or section.startswith("[test_utils"):
            continue
        homes = found.get(match[1], [])
        if match[3] in homes or (match[3] == "-" and not homes):
            continue
        print(f"{section:34} {match[1]:44} {match[3]} -> {' or '.join(homes) or '-'}")
        if write and len(homes) < 2:
            lines[at] = f"{match[1]}{match[2]}{homes[0] if homes else '-'}"
    if write:
        NAMES.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
