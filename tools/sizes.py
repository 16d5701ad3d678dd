"""What is larger than the budget: files over 400 lines, functions over 50. `hatch run sizes` prints, so that somebody looks.

It never fails: a number is a reason to look, not a verdict.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from workspace import ROOT

FILE_LINES = 400
FUNCTION_LINES = 50
FOLDERS = ("packages", "tools", "integration-tests", "docs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="report test files too")
    arguments = parser.parse_args()
    files = [path for path in _python_files(ROOT) if arguments.tests or "tests" not in path.parent.parts]
    rows = [row for path in files for row in over_budget(path)]
    for size, what in sorted(rows, reverse=True):
        print(f"{size:5}  {what}")
    lines = sum(_lines(path) for path in files)
    print(
        f"{len(files)} files, {lines} lines; {len(rows)} over the budget ({FILE_LINES} a file, {FUNCTION_LINES} a function)"
    )


def over_budget(path: Path) -> Iterator[tuple[int, str]]:
    """(lines, what) for the file and each of its functions that is over the budget. A docstring does not count."""
    shown = path.relative_to(ROOT)
    if (lines := _lines(path)) > FILE_LINES:
        yield lines, str(shown)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                first = node.body[1]
            length = (node.end_lineno or node.lineno) - first.lineno + 1
            if length > FUNCTION_LINES:
                yield length, f"{shown}:{node.lineno} {node.name}"


def _python_files(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    main()
