"""The top level: lazy, typed, and without torch where it promises that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import acc_bigmodel
from acc_ops.testing import stub_names


def test_stub_and_table_name_the_same() -> None:
    stub = {name: home for name, home in stub_names(acc_bigmodel).items() if name != "__version__"}
    assert stub == acc_bigmodel._NAMES


@pytest.mark.parametrize("name", acc_bigmodel.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(acc_bigmodel, name).__doc__


@pytest.mark.parametrize("module", ["acc_bigmodel", "acc_bigmodel.placement", "acc_bigmodel.balance"])
def test_planning_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_load_imports_neither_the_hooks_that_run_models_nor_drawing(checkpoint: Path) -> None:
    code = (
        "import sys, torch; from torch import nn; from acc_bigmodel import load_checkpoint_in_model\n"
        "model = nn.ModuleDict({'norm': nn.BatchNorm1d(8, device='meta')})\n"
        f"load_checkpoint_in_model(model, {str(checkpoint)!r}, {{'': 'cpu'}})\n"
        "dear = 'acc_bigmodel.dispatch acc_bigmodel.picture acc_hooks.attach psutil safetensors.torch'.split()\n"
        "sys.exit(str([name for name in dear if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    (script,) = (block for block in blocks if block.startswith("# script.py"))

    def output(code: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert text.split("```\n")[2].strip() in output(blocks[0])
    assert (tmp_path / "placement.svg").exists()
    assert output(script).splitlines()[-1] == "0 torch.Size([5, 512])"
