"""`acc launch` with the flags of an engine: the script below trains under that engine, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, torch
from acc_trainer import Accelerator
from acc_plugins.parallel import set_plan

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
set_plan(model, {"0": "colwise", "2": "rowwise"})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.linspace(-1, 1, 16).view(4, 4)
losses = []
for _ in range(4):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
kinds = sorted({type(p.data).__name__ for p in model.parameters()})
state = accelerator.get_state_dict(model)
facts = {
    "type": accelerator.distributed_type.value, "model": type(model).__name__, "parameters": kinds, "losses": losses,
    "held": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()),
    "saved": None if not accelerator.is_main_process else [list(t.shape) for t in state.values()],
}
if accelerator.is_main_process:
    print("FACTS" + json.dumps(facts), flush=True)
accelerator.end_training()
"""


def _launch(tmp_path: Path, *words: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "acc_trainer.cli.main",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        *words,
        str(script),
    ]
    environ = {**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environ.pop("LOCAL_RANK", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    said = [line for line in done.stdout.splitlines() if line.startswith("FACTS")]
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(said[0].removeprefix("FACTS"))
    return facts


_WHOLE = [[8, 4], [8], [1, 8], [1]]  # 49 numbers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--use_fsdp", "--fsdp_version", "2"],
            {"type": "FSDP", "model": "FSDPSequential", "parameters": ["DTensor"]},
        ),
        (["--use_fsdp"], {"type": "FSDP", "model": "FullyShardedDataParallel", "parameters": ["Tensor"]}),
        (
            ["--use_parallelism_config", "--parallelism_config_tp_size", "2"],
            {"type": "MULTI_CPU", "model": "Sequential", "parameters": ["DTensor"]},
        ),
    ],
    ids=["fsdp2", "fsdp1", "tp"],
)
def test_a_script_trains_under_the_engine_that_the_launcher_names(
    tmp_path: Path, words: list[str], expected: dict[str, Any]
) -> None:
    facts = _launch(tmp_path, *words)
    assert {name: facts[name] for name in expected} == expected
    assert facts["saved"] == _WHOLE
    assert facts["held"] < 49
    assert facts["losses"][-1] < facts["losses"][0]
