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

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True) for _ in range(12)
        )
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
