"""Run the benchmarks: `hatch run bench [NAME ...]`; without a name, all of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("cli", "launch", "collectives", "step", "prefetch", "timing", "compile", "checkpoint", "strategies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)} (default: all)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        subprocess.run([sys.executable, str(HERE / f"bench_{name}.py")], check=True)


if __name__ == "__main__":
    main()
