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


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    table = text.split("```\n")[2]
    assert table.strip() in done.stdout
    assert (tmp_path / "placement.svg").exists()
