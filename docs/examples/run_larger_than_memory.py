"""Run a model within a fraction of the memory that it takes: what does not fit stays in the checkpoint's file, mapped.

    python docs/examples/run_larger_than_memory.py --budget 100MiB

A checkpoint of 400 MB with random weights is made on the spot. The model is built empty, planned within the budget, loaded and run.
The process's own memory hardly grows: a mapped page belongs to the file, and the system may drop it at any time.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from acc_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, plan_model, save_weights

WIDTH, BLOCKS = 1024, 12  # 8 * WIDTH**2 floats each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()


def own_mib() -> float:
    """Memory of this process that no file stands behind; not a number where the system does not say."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return next(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous:")), float("nan")
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--budget", default="100MiB", help="memory for weights on the CPU")
    budget = parser.parse_args().budget
    x, before = torch.ones(1, WIDTH), own_mib()
    with tempfile.TemporaryDirectory() as folder:
        whole = build()
        save_weights(whole.state_dict(), folder, "model")
        expected, size = whole(x), sum(parameter.nbytes for parameter in whole.parameters()) / 2**20
        del whole
        with init_empty_weights():
            model = build()
        placement = plan_model(model, {"cpu": budget}, no_split_module_classes=["Block"])
        print(placement.table())
        Path("placement.svg").write_text(placement.svg(f"{size:.0f} MiB within {budget}"))
        model = load_checkpoint_and_dispatch(model, folder, device_map=placement.device_map())
        apart = max((model(x) - expected).abs().max().item() for _ in range(2))
        print(
            f"model {size:.0f} MiB, own memory grew by {own_mib() - before:.1f} MiB, outputs differ by {apart}"
        )


if __name__ == "__main__":
    main()
