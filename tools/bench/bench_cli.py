"""First impressions: CPU time of `acc --help` and `acc launch --help`, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from measure import cpu_seconds, interleave, report

ROUNDS = 11
ADDED = """
import sys, time, torch
before = len(sys.modules); start = time.perf_counter()
from acc_trainer import Accelerator
print((time.perf_counter() - start) * 1e3, len(sys.modules) - before)
"""
ALONE = "import sys, acc_trainer; sys.exit('torch' in sys.modules)"


def main() -> None:
    acc = str(Path(sys.executable).with_name("acc"))
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "acc --help": [acc, "--help"],
        "acc launch --help": [acc, "launch", "--help"],
    }
    series = interleave({name: partial(cpu_seconds, command) for name, command in commands.items()}, ROUNDS)
    report("CPU time of the command line; goal 60 ms each", series, "python -c pass", {})
    runs = [
        subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=True)
        for _ in range(5)
    ]
    figures = sorted((float(r.stdout.split()[0]), int(r.stdout.split()[1])) for r in runs)
    added_ms, modules = figures[len(figures) // 2]
    missed = " MISSED" if added_ms > 15 or modules > 40 else ""
    print(
        f"\n`from acc_trainer import Accelerator` in a process that has torch: {added_ms:.1f} ms, {modules} modules (goal 15, 40){missed}"
    )
    loads = subprocess.run([sys.executable, "-c", ALONE]).returncode
    print(f"`import acc_trainer` alone loads torch: {'yes' if loads else 'no'} (goal: no)")


if __name__ == "__main__":
    main()
