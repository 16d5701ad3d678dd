"""The rows of "What to choose" in the README of acc-plugins and its scripts that need acc-trainer, each run as it stands there."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acc_plugins
from acc_bigmodel import load_weights
from acc_ops.optional import is_available
from acc_ops.testing import run_processes
from acc_plugins.parallel import set_plan
from acc_trainer import Accelerator

README = Path(__file__).parents[1] / "packages" / "acc-plugins" / "README.md"
ROW = re.compile(
    r"^\|(?P<case>[^|]+)\|[^|]+\| (?P<size>\d) \| `(?P<say>Accelerator\(.*\))` \|$", re.MULTILINE
)
ROWS = [
    (row["case"].strip(), int(row["size"]), row["say"])
    for row in ROW.finditer(README.read_text(encoding="utf-8"))
]
SCRIPTS = [
    code
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    if "acc_trainer" in code
]
_TIME, _WIDTH, _STEPS = 8, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        x = x + nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(self.up(x).relu())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), Block(), Block(), nn.Linear(_WIDTH, 1))
    set_plan(model, {"*.up": "colwise", "*.down": "rowwise"})
    return model


def _train(say: str) -> list[float]:
    """The losses of a short run, over all ranks; all rows train on the same samples, so that they can be compared."""
    names = {
        name: getattr(acc_plugins, name) for name in re.findall(r"\w+(?=\()", say) if name != "Accelerator"
    }
    accelerator = eval(say, {"Accelerator": Accelerator, **names})
    model = _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(4, _TIME, _WIDTH, generator=generator)
    config = accelerator.parallelism_config
    losses = []
    for _ in range(_STEPS):
        x, y = samples.clone(), samples.mean(-1, keepdim=True).cumsum(1)
        split = config is not None and config.cp_enabled
        step = (
            accelerator.maybe_context_parallel(buffers=[x, y], buffer_seq_dims=[1, 1])
            if split
            else nullcontext()
        )
        with step:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return losses


def _train_all(
    rows: list[tuple[str, int, str]], scripts: list[str], folder: str
) -> tuple[dict[str, list[float]], list[dict[str, Tensor]]]:
    """The losses of each row, and the weights that each script ends with."""
    torch.set_num_threads(1)
    os.chdir(folder)
    return {f"{case} ({size}): {say}": _train(say) for case, size, say in rows}, list(map(_run, scripts))


def _run(script: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(script, str(README), "exec"), names)
    return {
        name: value.detach() for name, value in names["model"].state_dict().items() if type(value) is Tensor
    }


@pytest.mark.parametrize("size", sorted({size for _, size, _ in ROWS}))
def test_every_row_trains_and_all_come_to_the_same(
    size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rows = [row for row in ROWS if row[1] == size and ("fp8" not in row[2] or is_available("torchao"))]
    expected = _reference()
    scripts = SCRIPTS if size == 2 else []
    told, ends = run_processes(size, _train_all, rows, scripts, str(tmp_path), timeout_s=250)[0]
    if scripts:
        _check_scripts(tmp_path, ends)
    for case, losses in told.items():
        coarse = 0.05 if "mixed_precision" in case else 1e-4
        assert losses == pytest.approx(expected, rel=coarse), case
    assert expected[-1] < expected[0]


def _check_scripts(folder: Path, ends: list[dict[str, Tensor]]) -> None:
    """Shards make one set of files, and split sequences the weights of whole ones."""
    shards, context = SCRIPTS
    assert "fsdp_version=2" in shards
    assert set(load_weights(folder / "runs" / "export", "model")) == {
        f"{block}.{layer}.{what}"
        for block in range(4)
        for layer in ("up", "down")
        for what in ("weight", "bias")
    }
    assert (folder / "runs" / "sharded" / "pytorch_model_fsdp_0").is_dir()
    alone = context.replace("parallelism_config=ParallelismConfig(cp_size=2)", "")
    assert alone != context
    torch.testing.assert_close(ends[1], _run(alone), rtol=1e-3, atol=1e-5)


def _reference() -> list[float]:
    model = _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, _TIME, _WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(_STEPS):
        loss = (model(x) - x.mean(-1, keepdim=True).cumsum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_table_names_every_strategy_and_what_goes_with_them() -> None:
    said = " ".join(say for _, _, say in ROWS)
    assert len(ROWS) == 12
    for word in (
        "fsdp_version=1",
        "fsdp_version=2",
        "dp_replicate_size",
        "tp_size",
        "cp_size",
        "cpu_offload",
        "fp8",
        "backend=",
    ):
        assert word in said
