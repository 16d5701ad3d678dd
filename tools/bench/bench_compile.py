"""Cold start of torch.compile: CPU time of a process up to its first training step, with empty caches, whole model against regional (12 layers)."""

from __future__ import annotations

import sys
import tempfile
from functools import partial

from measure import cpu_seconds, interleave, report

ROUNDS = 3
STEP = """
import sys, torch
from torch import nn
from acc_trainer import Accelerator
from acc_plugins import TorchDynamoPlugin

class Block(nn.Module):  # none of torch's own: torch.compile leaves those eager when they are compiled in place, as by hand below
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(256), nn.LayerNorm(256)
        self.queries, self.out = nn.Linear(256, 3 * 256), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        q, k, v = self.queries(self.first(x)).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(256, 1)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

how = sys.argv[1]
plugin = None
if how in ("whole", "regional", "one layer"):
    plugin = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=how == "regional")
accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
model = Deep() if how != "one layer" else nn.Sequential(nn.Embedding(100, 256), nn.Linear(256, 1))  # what every start costs
if how == "by hand":
    for block in model.blocks:
        block.compile()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
accelerator.backward(model(torch.randint(100, (2, 64))).square().mean())
optimizer.step()
"""


def main() -> None:
    names = ("eager", "one layer", "whole", "regional", "by hand")
    series = interleave({name: partial(_cold, name) for name in names}, ROUNDS, warmup=0)
    report("cold start, compiled by inductor", series, "whole", {"regional": 0.5}, unit="s")


def _cold(how: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        return cpu_seconds([sys.executable, "-c", STEP, how], {"TORCHINDUCTOR_CACHE_DIR": cache})


if __name__ == "__main__":
    main()
