"""Cold start of torch.compile: CPU and wall seconds of a process up to its first training step, with empty caches (12 layers, 256 wide): `bench_compile.py [MODEL ...]`.

Three of transformers' models, where it is installed, and a plain one. What each start costs without any compilation (imports, one eager step) and what the
first graph of all costs (inductor's own start: a model of one small function) are rows apart: no way to compile can be faster than those.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measure import Series, cpu_seconds, interleave, report

STEP = Path(__file__).with_name("compile_step.py")
ROUNDS = 2  # a round of all models takes a quarter of an hour of CPU time
MODELS = ("plain", "gpt2", "bert", "llama")
WAYS = ("whole", "regional", "by hand")


def main() -> None:
    models = [
        model for model in MODELS if model == "plain" or importlib.util.find_spec("transformers") is not None
    ]
    for model in sys.argv[1:] or models:
        walls: dict[str, list[float]] = {}
        ways = ("eager", "start of inductor", *WAYS)
        series = interleave({way: partial(_cold, model, way, walls) for way in ways}, ROUNDS, warmup=0)
        report(f"{model}: cold start, CPU seconds", series, "whole", {"regional": 0.5}, unit="s")
        in_wall = {way: Series(name=way, values=values) for way, values in walls.items()}
        report(f"{model}: cold start, wall seconds", in_wall, "whole", {}, unit="s")
        _print_what_compiling_costs(series)


def _cold(model: str, way: str, walls: dict[str, list[float]]) -> float:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        used = cpu_seconds([sys.executable, str(STEP), model, way], {"TORCHINDUCTOR_CACHE_DIR": cache})
    walls.setdefault(way, []).append(time.perf_counter() - started)
    return used


def _print_what_compiling_costs(series: dict[str, Series]) -> None:
    """What is left of each way without what any process, or any first graph, costs."""
    for floor in ("eager", "start of inductor"):
        apart = {way: series[way].median - series[floor].median for way in WAYS}
        shown = ", ".join(f"{way} {seconds:.1f} s" for way, seconds in apart.items())
        print(f"  above {floor}: {shown}; whole / regional {apart['whole'] / apart['regional']:.2f}")


if __name__ == "__main__":
    main()
