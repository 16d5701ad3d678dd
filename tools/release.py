"""Release one package: `hatch run release acc-ops minor`.

Bumps the version in `__about__.py`, builds CHANGELOG.md from the fragments in changelog.d/ (towncrier), and, where the new version leaves the
range that another package pins, moves that pin and leaves a fragment there. Nothing is committed, tagged or uploaded: the commands that do
it are printed, and the tag starts .github/workflows/release.yml. Refuses, before writing anything, without a fragment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version
from workspace import ROOT, Package, package_named, packages

KINDS = ("added", "changed", "fixed", "removed")
CONFIG = Path(__file__).resolve().parent / "towncrier.toml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="acc-ops, acc-hooks, ...")
    parser.add_argument("bump", help="major, minor, patch, or a version such as 0.3.0")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    package = package_named(arguments.package, arguments.root)
    new = bumped(package.version, arguments.bump)
    if not fragments(package):
        raise SystemExit(
            f"{package.name} has no changelog fragment: write packages/{package.name}/changelog.d/<id>.<kind>.md "
            f"(kinds: {', '.join(KINDS)}) that tells users what changed"
        )
    changed = release(package, new, arguments.root)
    tag = f"{package.name}-v{new}"
    print(f"{package.name} {package.version} is ready.")
    for path in changed:
        print(f"  {path.relative_to(arguments.root)}")
    print(
        f"Next: git add packages && git commit -m '{package.name} {new}' && git tag {tag} && git push origin main {tag}"
    )


def bumped(version: str, how: str) -> str:
    """The version after `how`: major, minor, patch or a version that must be newer."""
    old = Version(version)
    steps = {
        "major": (old.major + 1, 0, 0),
        "minor": (old.major, old.minor + 1, 0),
        "patch": (old.major, old.minor, old.micro + 1),
    }
    if how in steps:
        return ".".join(map(str, steps[how]))
    try:
        new = Version(how)
    except InvalidVersion:
        raise SystemExit(f"{how!r} is neither major, minor, patch nor a version") from None
    if new <= old:
        raise SystemExit(f"{how} is not newer than {version}")
    return str(new)


def fragments(package: Package) -> list[Path]:
    """The changelog fragments of a package; a file of another name is an error, as towncrier would leave it out silently."""
    found = sorted(p for p in (package.folder / "changelog.d").iterdir() if p.name != ".gitkeep")
    for path in found:
        parts = path.name.split(".")
        if path.suffix != ".md" or len(parts) < 3 or parts[-2] not in KINDS:
            raise SystemExit(f"{path}: a fragment is named <id>.<kind>.md with a kind of {', '.join(KINDS)}")
    return found


def release(package: Package, new: str, root: Path = ROOT) -> list[Path]:
    """Write the new version, the changelog and the dependents' pins; the files changed."""
    old = package.version
    command = [
        sys.executable,
        "-m",
        "towncrier",
        "build",
        "--yes",
        "--config",
        str(CONFIG),
        "--dir",
        str(package.folder),
    ]
    command += ["--name", package.name, "--version", new]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if done.returncode:
        raise SystemExit(f"towncrier failed:\n{done.stdout}{done.stderr}")
    package.about.write_text(package.about.read_text().replace(f'"{old}"', f'"{new}"'))
    (package.folder / "changelog.d" / ".gitkeep").touch()
    return [package.about, package.folder / "CHANGELOG.md", *move_pins(package.name, new, root)]


def move_pins(name: str, new: str, root: Path = ROOT) -> list[Path]:
    """Let the packages that pin `name` accept version `new` where they don't; the files changed."""
    changed: list[Path] = []
    for dependent in packages(root):
        everything = [*dependent.dependencies, *(r for group in dependent.extras.values() for r in group)]
        stale = [r for r in everything if r.name == name and not r.specifier.contains(new, prereleases=True)]
        if not stale:
            continue
        pyproject = dependent.folder / "pyproject.toml"
        text = pyproject.read_text()
        for requirement in stale:
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            text = re.sub(rf'"{re.escape(name + extras)}[<>=!~][^"]*"', f'"{name}{extras}{pin(new)}"', text)
        pyproject.write_text(text)
        note = dependent.folder / "changelog.d" / f"+{name}-{new}.changed.md"
        note.write_text(f"Works with {name} {pin(new)}.\n")
        changed += [pyproject, note]
    return changed


def pin(version: str) -> str:
    """The range a sibling pins: up to the next version that may break it (the minor one below 1.0, else the major)."""
    v = Version(version)
    if v.major == 0:
        return f">=0.{v.minor},<0.{v.minor + 1}"
    return f">={v.major}.{v.minor},<{v.major + 1}"


if __name__ == "__main__":
    main()
