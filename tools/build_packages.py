"""Build the wheels and source archives of the packages into dist/: `hatch run build [NAME ...]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from workspace import ROOT, package_named, packages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages to build (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for built in build(arguments.names, arguments.out):
        print(built)


def build(names: list[str], out: Path, *, sdist: bool = True) -> list[Path]:
    """Build the named packages (all of them for an empty list) into `out`; the files written, oldest layer first."""
    chosen = [package_named(name) for name in names] or packages()
    built: list[Path] = []
    for package in chosen:
        before = set(out.glob("*"))
        kinds = ["--sdist", "--wheel"] if sdist else ["--wheel"]
        command = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            *kinds,
            "--outdir",
            str(out),
            str(package.folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"building {package.name} failed:\n{done.stdout}{done.stderr}")
        built += sorted(set(out.glob("*")) - before) or sorted(
            out.glob(f"{package.import_name}-{package.version}*")
        )
    return built


if __name__ == "__main__":
    main()
