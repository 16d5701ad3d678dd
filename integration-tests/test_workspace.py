"""The shape of the workspace, frozen: what lies at the top, and what every package brings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

TOP = {
    "packages",
    "tools",
    "integration-tests",
    "docs",
    "hatch.toml",
    ".github",
    "README.md",
    "LICENSE",
    ".gitignore",
    ".ci",
}
PACKAGES = ("acc-ops", "acc-hooks", "acc-bigmodel", "acc-plugins", "acc-trainer", "acc-compat")


def test_the_top_level_is_exactly_what_was_agreed(root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert {line.split("/")[0] for line in listed.splitlines()} <= TOP


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_brings_its_own_files(root: Path, name: str) -> None:
    folder = root / "packages" / name
    source = folder / "src" / name.replace("-", "_")
    wanted = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "changelog.d", "tests"]
    missing = [wanted_file for wanted_file in wanted if not (folder / wanted_file).exists()]
    missing += [
        f for f in ("__about__.py", "__init__.py", "__init__.pyi", "py.typed") if not (source / f).exists()
    ]
    assert missing == []
    assert re.search(r'__version__ = "\d+\.\d+\.\d+"', (source / "__about__.py").read_text())


@pytest.mark.parametrize("name", PACKAGES)
def test_siblings_are_pinned_by_ranges(root: Path, name: str) -> None:
    text = (root / "packages" / name / "pyproject.toml").read_text()
    pins = re.findall(
        r'"(acc-[a-z]+)(\[[a-z,]+\])?([^"]*)"', text.split("dependencies = [", 1)[1].split("]\n", 1)[0]
    )
    for sibling, _, specifier in pins:
        assert re.fullmatch(r">=\d+\.\d+,<\d+(\.\d+)?", specifier), f"{name} pins {sibling}{specifier}"


def test_nothing_imports_the_library_we_answer_for(root: Path) -> None:
    pattern = re.compile(r"^\s*(import accelerate|from accelerate)\b", re.MULTILINE)
    files = [
        p
        for folder in ("packages", "tools", "integration-tests", "docs")
        for p in (root / folder).rglob("*.py")
    ]
    offenders = [
        str(p.relative_to(root))
        for p in files
        # round_trips.py runs itself in an environment that has the library, to compare files; no test does
        if "acc-compat" not in p.parts and p.name != "round_trips.py" and pattern.search(p.read_text())
    ]
    assert offenders == []


@pytest.mark.parametrize("folder", [*(f"packages/{name}/tests" for name in PACKAGES), "integration-tests"])
def test_all_tests_draw_their_examples_by_one_profile(root: Path, folder: str) -> None:
    assert "\nuse_test_profile()\n" in (root / folder / "conftest.py").read_text()
