"""Each package stands alone: its wheel, in an empty environment with only what it declares, is imported and tested there.

`hatch run isolation [NAME ...]`. For every package: build all wheels, make an empty virtual environment, install the wheel (siblings come
from the wheels just built, the rest as declared), import every module of it, then add pytest and hypothesis and run the package's own
tests from a folder outside the workspace. As many packages at a time as there are cores, or as `--jobs` says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_packages import build
from workspace import ROOT, Package, package_named, packages

TORCH = "torch==2.13.0"  # as in hatch.toml, so that the CPU build is taken
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

# A module that needs an extra says so when it is used, not when it is imported: all of them must import.
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(f"  {len(names)} modules imported, {len(package.__all__)} public names")
for name in package.__all__:
    getattr(package, name)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages to try (default: all)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="packages at a time (default: the number of cores)",
    )
    arguments = parser.parse_args()
    chosen = [package_named(name) for name in arguments.names] or packages()
    with tempfile.TemporaryDirectory(prefix="acc-isolation-") as folder:
        work = Path(folder)
        build([], work / "wheels", sdist=False)
        shutil.copy(ROOT / "tools" / "pytest.ini", work)
        with ThreadPoolExecutor(
            arguments.jobs
        ) as pool:  # each mostly waits for an installation, or tests with one thread
            for package, said in zip(chosen, pool.map(lambda one: try_alone(one, work), chosen), strict=True):
                print(f"{package.name} {package.version}\n{said}", flush=True)


def try_alone(package: Package, work: Path) -> str:
    """Install, import and test one package in an environment of its own, and what that printed; SystemExit, with it, when anything fails."""
    home = work / package.name
    venv.create(home, with_pip=True)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    wheels = work / "wheels"
    (wheel,) = wheels.glob(f"{package.import_name}-{package.version}-*.whl")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--find-links", str(wheels), TORCH, str(wheel)], work)
    _run([str(python), "-m", "pip", "check", "--disable-pip-version-check"], work)
    imported = _run([str(python), "-c", IMPORT_ALL, package.import_name], work)
    _run([*pip, *TEST_TOOLS], work)
    alone = work / "source" / package.name  # what the source archive has beside src/
    shutil.copytree(package.folder / "tests", alone / "tests")
    for page in (*package.folder.glob("*.md"), *package.folder.glob("*.svg")):
        shutil.copy(page, alone)
    tests = ["-c", str(work / "pytest.ini"), "--rootdir", str(alone), str(alone / "tests")]
    tested = _run([str(python), "-m", "pytest", *tests], work)
    shutil.rmtree(home)
    return imported + tested


def _run(command: list[str], folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command[:6])} ...\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
