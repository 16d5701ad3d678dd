"""From starting a launcher with two workers to the first line of the slower one: `acc launch` against torchrun and two bare interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measure import interleave, report

ROUNDS = 9
WORKER = "import time\nT = time.time()\nimport os\nos.write(1, f'FIRST {T}\\n'.encode())\n"


def main() -> None:
    bin_folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        contenders = {
            "torchrun": partial(
                first_line, [[str(bin_folder / "torchrun"), "--nproc_per_node", "2", str(script)]]
            ),
            "two interpreters": partial(first_line, [[sys.executable, str(script)]] * 2),
            "acc launch": partial(
                first_line,
                [[str(bin_folder / "acc"), "launch", "--cpu", "--num_processes", "2", str(script)]],
            ),
        }
        series = interleave(contenders, ROUNDS)
    report(
        "launch of two workers, to the first line of the slower one", series, "torchrun", {"acc launch": 0.07}
    )


def first_line(commands: list[list[str]]) -> float:
    """Seconds from the start of `commands` to the later of the two workers' first lines."""
    start = time.time()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        for c in commands
    ]
    texts = [process.communicate() for process in running]
    stamps = [
        float(line.split()[1]) for out, _ in texts for line in out.splitlines() if line.startswith("FIRST")
    ]
    if len(stamps) != 2 or any(process.returncode for process in running):
        raise SystemExit(f"{commands[0][0]}: {len(stamps)} workers spoke\n{texts}")
    return max(stamps) - start


if __name__ == "__main__":
    main()
